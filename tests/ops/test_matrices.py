"""Linear algebra against PyTorch: values, gradients, second derivatives, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd import Tensor, grad
from mpitrain.errors import ShapeError
from tests.ops.parity import check, check_gradient, normal

torch = pytest.importorskip("torch")
linalg = torch.linalg

SQUARE = normal(2, 4, 4, seed=3) + 3 * np.eye(4)
DEFINITE = SQUARE @ SQUARE.swapaxes(-1, -2)
WIDE = {"float64": 1e-10, "float32": 3e-5}

CASES = {
    "solve": (ops.solve, linalg.solve, SQUARE, (2, 4, 3)),
    "solve vectors": (ops.solve, linalg.solve, SQUARE, (2, 4)),
    "solve from the right": (lambda a, b: ops.solve(a, b, left=False), lambda a, b: linalg.solve(a, b, left=False), SQUARE,
                             (2, 3, 4)),
    "solve for many": (ops.solve, linalg.solve, SQUARE[0], (3, 4, 2)),
    "inv": (ops.inv, linalg.inv, SQUARE), "det": (ops.det, linalg.det, SQUARE),
    "slogdet": (ops.slogdet, lambda a: tuple(linalg.slogdet(a)), -SQUARE), "logdet": (ops.logdet, torch.logdet, DEFINITE),
    "cholesky of what is symmetric": (ops.cholesky, linalg.cholesky, DEFINITE),
    "cholesky": (lambda a: ops.cholesky(a + ops.swapaxes(a, -1, -2)), lambda a: linalg.cholesky(a + a.mT), DEFINITE),
    "solve a triangle": (lambda a, b: ops.solve_triangular(a, b, upper=True),
                         lambda a, b: linalg.solve_triangular(a, b, upper=True), SQUARE, (2, 4, 3)),
    "pinv": (ops.pinv, linalg.pinv, (2, 5, 3)), "qr": (ops.qr, lambda a: tuple(linalg.qr(a)), (2, 5, 3)),
    "eigenvalues": (lambda a: ops.eigvalsh(a + ops.swapaxes(a, -1, -2)), lambda a: linalg.eigvalsh(a + a.mT), SQUARE),
    "projectors": (lambda a: (lambda v: v[:, :, None, :2] * v[:, None, :, :2])(ops.eigh(a + ops.swapaxes(a, -1, -2))[1]),
                   lambda a: (lambda v: v[:, :, None, :2] * v[:, None, :, :2])(linalg.eigh(a + a.mT)[1]), SQUARE),
    "singular values": (ops.svdvals, linalg.svdvals, (2, 5, 3)),
    "powers": (lambda a: ops.matrix_power(a, 5), lambda a: linalg.matrix_power(a, 5), (3, 3)),
    "chain": (lambda *xs: ops.multi_dot(xs), lambda *xs: linalg.multi_dot(xs), (4, 2), (2, 5), (5, 3), (3,)),
    "cross": (ops.cross, linalg.cross, (4, 3), (1, 3)), "kron": (ops.kron, torch.kron, (2, 3), (4, 1, 2)),
    "addmm": (lambda x, a, b: ops.addmm(x, a, b, beta=0.5, alpha=2.0), lambda x, a, b: torch.addmm(x, a, b, beta=0.5, alpha=2.0),
              (4,), (2, 3), (3, 4)),
    "distances": (ops.cdist, torch.cdist, (2, 4, 3), (2, 5, 3)),
    "a third norm": (lambda x: ops.vector_norm(x, 3, 1), lambda x: linalg.vector_norm(x, 3, 1), (3, 4)),
    "a norm below 1": (lambda x: ops.vector_norm(x, 0.5, 1), lambda x: linalg.vector_norm(x, 0.5, 1), (3, 4)),
    "the largest": (lambda x: ops.vector_norm(x, float("inf")), lambda x: linalg.vector_norm(x, float("inf")), (3, 4)),
    "the nuclear norm": (lambda x: ops.matrix_norm(x, "nuc"), lambda x: linalg.matrix_norm(x, "nuc"), (2, 3, 4)),
    "the sum of a column": (lambda x: ops.matrix_norm(x, 1), lambda x: linalg.matrix_norm(x, 1), (2, 3, 4)),
}
FIRST_ONLY = ("singular values", "the nuclear norm", "distances")


@pytest.mark.parametrize("name", CASES)
def test_linear_algebra_equals_pytorch(name):
    check(*CASES[name], tolerance=WIDE)


@pytest.mark.parametrize("name", [name for name in CASES if name not in FIRST_ONLY])
def test_its_second_derivatives_equal_pytorchs(name):
    ours, theirs, *given = CASES[name]
    arrays = [normal(*x, seed=i) if isinstance(x, tuple) else x for i, x in enumerate(given)]
    found = []
    for of, derive, function in ((lambda x: Tensor(x, requires_grad=True), grad, ours),
                                 (lambda x: torch.tensor(x, requires_grad=True), torch.autograd.grad, theirs)):
        leaves = [of(x) for x in arrays]
        results = function(*leaves)
        results = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
        first = derive(sum((r ** 3).sum() for r in results), leaves, create_graph=True)
        found.append([np.asarray(g.array if of(arrays[0]).__class__ is Tensor else g) for g in
                      derive(sum((g ** 2).sum() for g in first), leaves)])
    for mine, wanted in zip(*found):
        assert np.abs(mine - wanted).max() <= 1e-9 * max(np.abs(wanted).max(), 1)


def test_the_determinant_of_a_singular_matrix_has_its_gradient():
    """The cofactors, where PyTorch 2.13 gives 0."""
    a = Tensor(np.array([[2.0, 0, 2], [2, 0, 4], [3, 0, 6]]), requires_grad=True)
    ops.det(a).backward()
    np.testing.assert_allclose(a.grad, [[0, 0, 0], [0, 6, 0], [0, -4, 0]], atol=1e-12)


SINGULAR = {
    "rank 2 of 3": np.array([[2.0, 0, 2], [2, 0, 4], [3, 0, 6]]), "rank 1 of 3": np.outer([1.0, 2, 3], [1.0, -1, 2]),
    "all ones": np.ones((3, 3)), "zeros": np.zeros((3, 3)), "rank 1 of 2": np.array([[1.0, 2], [2, 4]]),
    "a zero": np.zeros((1, 1)),
    "a batch": np.stack([np.ones((3, 3)), np.diag([1.0, 0, 2]), np.diag([1.0, 5, 2])]), "nothing": np.ones((2, 0, 0)),
    "complex": np.outer([1.0, 2j, 3], [1.0, -1, 2 + 1j])}


@pytest.mark.parametrize("name", SINGULAR)
def test_the_second_derivative_of_a_determinant_wants_no_inverse(name: str) -> None:
    """Against that of the sum over permutations, which has no inverse either."""
    from itertools import permutations
    a = SINGULAR[name]
    n, direction = a.shape[-1], normal(*a.shape, seed=1) * (1 if a.dtype == float else 1 + 2j)

    def leibniz(x: torch.Tensor) -> torch.Tensor:
        total = x.sum((-2, -1)) * 0
        for order in permutations(range(n)):
            sign = np.linalg.det(np.eye(n)[list(order)]).round()
            total = total + sign * torch.stack([x[..., i, j] for i, j in enumerate(order)] or [total * 0 + 1]).prod(0)
        return total

    found = []
    for leaf, derive, function, plain in ((lambda x: Tensor(x, requires_grad=True), grad, ops.det, lambda x: x),
                                          (lambda x: torch.tensor(x, requires_grad=True), torch.autograd.grad, leibniz,
                                           torch.tensor)):
        x = leaf(a)
        value = function(x)
        first, = derive((value * value.conj() + 3 * value).sum().real, [x], create_graph=True)
        second, = derive((first * plain(direction)).sum().real, [x])
        found += [(value, first, second)]
    for mine, wanted in zip(*found):
        np.testing.assert_allclose(mine.array, wanted.detach().numpy(), rtol=1e-12, atol=1e-12)


def test_third_derivatives_of_a_determinant_are_of_invertible_matrices() -> None:
    found = []
    for leaf, derive, function in ((lambda x: Tensor(x, requires_grad=True), grad, ops.det),
                                   (lambda x: torch.tensor(x, requires_grad=True), torch.autograd.grad, torch.linalg.det)):
        x = leaf(SQUARE)
        value = function(x).sum()
        for _ in range(3):
            first, = derive(value, [x], create_graph=True)
            value = (first ** 2).sum()
        found.append(first)
    np.testing.assert_allclose(found[0].array, found[1].detach().numpy(), rtol=1e-9)
    a = Tensor(np.zeros((2, 2)), requires_grad=True)
    second = ops.sum(grad(ops.sum(grad(ops.det(a) ** 2, [a], create_graph=True)[0] ** 2), [a], create_graph=True)[0] ** 2)
    with pytest.raises(ShapeError, match="^det: a matrix is singular, and derivatives above the second"):
        grad(second, [a])


def test_a_norm_of_nothing_has_the_slope_0():
    for order in (2, 3, 0.5, 1, float("inf")):
        x = Tensor(np.zeros(3), requires_grad=True)
        ops.vector_norm(x, order).backward()
        assert x.grad.tolist() == [0, 0, 0]


def test_factors_solve_and_pass_the_gradient_check():
    check_gradient(lambda b, a: ops.cholesky_solve(b, ops.cholesky(a @ a.T)), (3, 2), SQUARE[0, :3, :3])
    lower = ops.cholesky(DEFINITE[0])
    np.testing.assert_allclose(ops.cholesky_inverse(lower).array, np.linalg.inv(DEFINITE[0]), rtol=1e-9)
    u, s, v = ops.svd(SQUARE[0])
    np.testing.assert_allclose((u.array * s.array) @ v.array, SQUARE[0], atol=1e-12)
    assert ops.matrix_rank(np.outer([1.0, 2], [1.0, 2])).item() == 1


def test_matrices_that_do_not_fit_are_refused():
    a, b = np.zeros((2, 2)), np.zeros((3, 2))
    cases = [
        (lambda: ops.inv(b), r"inv: shape \(3, 2\), expected square matrices"), (lambda: ops.inv(a), "Inverse: Singular matrix"),
        (lambda: ops.cholesky(-np.eye(2)), "not positive definite"), (lambda: ops.solve(a, b), "solve: matrices .* do not fit"),
        (lambda: ops.det(np.zeros((2, 2), int)), "det: an input is int64, expected float32"),
        (lambda: ops.addmm(a, a, b), r"mm: shapes \(2, 2\) and \(3, 2\) do not fit"),
        (lambda: ops.baddbmm(a, a, b), "expected 3, 3 dims"),
        (lambda: ops.cross(a, a), "cross: dim -1 of shapes .* expected 3 in both"),
        (lambda: ops.multi_dot([a]), "expected two matrices"),
        (lambda: ops.matrix_norm(a, "max"), "matrix_norm: shape .* expected two dims, and"),
        (lambda: ops.tensorinv(a, 2), "tensorinv: ind 2"), (lambda: ops.cdist(a, np.zeros((2, 3))), "expected rows of one width"),
    ]
    for call, message in cases:
        with pytest.raises(ShapeError, match=message):
            call()


@pytest.mark.parametrize("shape", [(40, 30, 16), (2, 3, 25, 20, 33), (500, 40, 1)])
def test_distances_by_products_are_those_of_differences(shape: tuple[int, ...]) -> None:
    """Rows that are close, equal, far from 0, huge or tiny, where |x|^2 + |y|^2 - 2 x y has no digits, or no number."""
    *lead, i, j, d = shape
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((*lead, i, d)).astype("f"), rng.standard_normal((*lead, j, d)).astype("f")
    b[..., 0, :], b[..., 1, :] = a[..., 0, :], a[..., 1, :] * np.float32(1 + 1e-6)
    b[..., 2, :] = 1e-25
    a[..., 3, :], b[..., 3, :] = 1e19, 1.0000001e19
    g = rng.standard_normal((*lead, i, j)).astype("f")
    x, y = Tensor(a, requires_grad=True), Tensor(b, requires_grad=True)
    found = ops.cdist(x, y)
    ops.sum(found * g).backward()
    gap = a[..., :, None, :].astype("d") - b[..., None, :, :]
    wanted = np.sqrt((gap * gap).sum(-1))
    np.testing.assert_allclose(found.array, wanted, rtol=1.3e-7)
    assert found.array[..., 0, 0].max() == 0
    slope = (g / np.where(wanted == 0, np.inf, wanted))[..., None] * gap
    assert x.grad is not None and y.grad is not None
    np.testing.assert_allclose(x.grad, slope.sum(-2), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(y.grad, -slope.sum(-3), rtol=2e-6, atol=4e-6)
    a[..., 4, 0] = np.inf
    found = ops.cdist(a, b)
    assert np.isposinf(found.array[..., 4, :]).all() and np.isfinite(found.array[..., 5, :]).all()


def test_distances_by_products_have_second_derivatives() -> None:
    rng = np.random.default_rng(0)
    x, y = Tensor(rng.standard_normal((40, 11)).astype("f"), requires_grad=True), rng.standard_normal((40, 11)).astype("f")
    x64 = Tensor(x.array.astype("d"), requires_grad=True)
    found = [grad(ops.sum(grad(ops.sum(ops.cdist(a, b)), [a], create_graph=True)[0] ** 2), [a])[0].array
             for a, b in ((x, y), (x64, y.astype("d")))]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-4)
