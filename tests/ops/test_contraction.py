"""einsum and tensordot against PyTorch, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd import Tensor, grad
from mpitrain.errors import ShapeError
from tests.ops.parity import check

torch = pytest.importorskip("torch")

EQUATIONS = [
    ("ij,jk->ik", (2, 3), (3, 4)), ("bij,bkj->bik", (2, 3, 4), (2, 5, 4)), ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("bhqk,bhkd->bqhd", (2, 3, 4, 5), (2, 3, 5, 6)), ("i,j->ij", (3,), (4,)), ("i,i->", (3,), (3,)), ("ij->", (2, 3)),
    ("ij->ji", (2, 3)), ("ii->i", (4, 4)), ("ii", (4, 4)), ("iij,jk->ik", (3, 3, 4), (4, 2)), ("iji->j", (3, 4, 3)),
    ("...ij,...jk->...ik", (5, 2, 3), (3, 4)), ("...ij,jk", (2, 2, 2, 3), (3, 4)), ("b...,b...->...", (3, 2, 4), (3, 2, 4)),
    ("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)), ("bxyz,io,bx,yi->bo", (2, 3, 4, 2), (3, 5), (2, 3), (4, 3)),
    ("ba,ca", (2, 3), (4, 3)), ("ij,ij->ij", (2, 3), (2, 3)), ("ijk,ijl->ij", (2, 3, 4), (2, 3, 5)),
    ("ij,kl->il", (2, 3), (4, 5)),
    ("bcij,bcij->bc", (2, 3, 4, 5), (2, 3, 4, 5)), ("ij,jk->ik", (0, 3), (3, 4)), ("ij,jk->ik", (2, 0), (0, 4)),
    ("ij,jk->ik", (2, 1), (3, 4)), ("a,b,c,d,e->edcba", (2,), (3,), (2,), (3,), (2,)), ("...a,a...->...", (2, 3), (3, 2)),
]


@pytest.mark.parametrize("case", EQUATIONS, ids=str)
def test_einsum_equals_pytorch(case):
    equation, *shapes = case
    check(lambda *xs: ops.einsum(equation, *xs), lambda *xs: torch.einsum(equation, *xs), *shapes)


def test_einsum_has_second_derivatives_also_of_complex_numbers():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s) + 1j * rng.standard_normal(s) for s in ((2, 3, 4), (3, 5, 4)))
    results = []
    for number, of, derive, einsum in ((Tensor, lambda x: Tensor(x, requires_grad=True), grad, ops.einsum),
                                       (None, lambda x: torch.tensor(x, requires_grad=True), torch.autograd.grad, torch.einsum)):
        x, y = of(a), of(b)
        loss = (abs(einsum("bix,iox->box", x, y)) ** 2).sum()
        first = derive(loss, [x, y], create_graph=True)
        second = derive(sum((abs(g) ** 2).sum() for g in first), [x, y])
        results.append([np.asarray(g.array if number else g.detach().resolve_conj().numpy()) for g in (*first, *second)])
    for mine, theirs in zip(*results):
        np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dims", [0, 1, 2, ([0, 2], [1, 0]), ([-1], [0])], ids=str)
def test_tensordot_equals_pytorch(dims):
    shapes = {2: ((2, 3, 4), (3, 4, 5)), "[": ((2, 3, 4), (4, 2, 5))}.get(dims if dims == 2 else "[")
    check(lambda x, y: ops.tensordot(x, y, dims), lambda x, y: torch.tensordot(x, y, dims), *shapes)


def test_equations_that_do_not_fit_are_refused():
    x, y = np.zeros((2, 3)), np.zeros((3, 4))
    cases = [
        (lambda: ops.einsum("ij,jk->ik", x), 'einsum: "ij,jk->ik" names 2 operands, found 1'),
        (lambda: ops.einsum("ijk,jk->i", x, y), 'einsum: "ijk" in "ijk,jk->i" does not name the 2 dims of its operand'),
        (lambda: ops.einsum("ij,ik->jk", x, y), r"has 2 and 3 for one index; shapes are \(2, 3\), \(3, 4\)"),
        (lambda: ops.einsum("ij->ijx", x), "has a letter twice, or one that no operand has"),
        (lambda: ops.einsum("i1->i", x), "does not name the 2 dims"),
        (lambda: ops.tensordot(x, y, 2), r"tensordot: dims \[0, 1\] of shape .* differ in size"),
        (lambda: ops.tensordot(x, y, 3), "tensordot: 3 dims of shapes"),
    ]
    for call, message in cases:
        with pytest.raises(ShapeError, match=message):
            call()
