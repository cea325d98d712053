"""Fourier transforms and complex numbers against PyTorch: values, gradients of complex leaves, second derivatives."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd import Tensor, grad
from mpitrain.errors import ShapeError
from tests.ops.parity import check

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(0)
ONE = [("fft", {}), ("ifft", {"n": 9, "norm": "ortho"}), ("fft", {"n": 3, "dim": 0, "norm": "forward"}), ("irfft", {}),
       ("irfft", {"n": 7, "norm": "forward"}), ("hfft", {"norm": "ortho"}), ("hfft", {"n": 7, "dim": 1})]
SEVERAL = [("fft2", {}), ("ifftn", {"s": (4, 7), "norm": "ortho"}), ("irfft2", {"norm": "forward"}), ("irfftn", {"s": (3, 6)}),
           ("hfftn", {"dim": (0, 2)})]
OF_REAL = [("rfft", {}), ("rfft", {"n": 9, "norm": "ortho"}), ("rfft2", {"norm": "forward"}), ("rfftn", {}), ("ihfft", {"n": 4}),
           ("ihfft2", {}), ("fft", {"norm": "ortho"}), ("ifftn", {"dim": (0, 1)})]


def numbers(*shape, dtype="complex128"):
    z = RNG.standard_normal(shape) + 1j * RNG.standard_normal(shape)
    return np.asarray(z if dtype.startswith("c") else z.real, dtype)


def alike(ours, theirs, *arrays, tolerance=1e-12):
    """Values, and first and second gradients of sum |y|^2 weighted, with respect to all arrays."""
    mine, yours = [Tensor(a, requires_grad=True) for a in arrays], [torch.tensor(a, requires_grad=True) for a in arrays]
    y, t = ours(*mine), theirs(*yours)
    close(y.array, t, tolerance)
    weight = RNG.standard_normal(y.shape).astype(y.array.real.dtype)
    first = grad((abs(y) ** 2 * weight).sum(), mine, create_graph=True)
    wanted = torch.autograd.grad((t.abs() ** 2 * torch.tensor(weight)).sum(), yours, create_graph=True)
    for a, b in zip(first, wanted):
        close(a.array, b, tolerance)
    mine_sum = sum(((abs(g) ** 2).sum() for g in first[1:]), (abs(first[0]) ** 2).sum())
    yours_sum = sum((g.abs() ** 2).sum() for g in wanted)
    for a, b in zip(grad(mine_sum, mine), torch.autograd.grad(yours_sum, yours)):
        close(a.array, b, tolerance)


def close(a, b, tolerance):
    b = b.detach().resolve_conj().numpy()
    assert a.shape == b.shape and a.dtype == b.dtype
    assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-30)


@pytest.mark.parametrize("dtype", ["complex128", "complex64"])
@pytest.mark.parametrize("case", [*ONE, *SEVERAL, *OF_REAL], ids=str)
def test_transforms_and_their_first_two_gradients_equal_pytorch(case, dtype):
    name, options = case
    if case in OF_REAL:
        dtype = {"complex128": "float64", "complex64": "float32"}[dtype]
    alike(lambda x: getattr(ops, name)(x, **options), lambda x: getattr(torch.fft, name)(x, **options),
          numbers(3, 4, 5, dtype=dtype), tolerance=1e-12 if dtype in ("complex128", "float64") else 3e-6)


PAIRS = {
    "sum": (lambda x, y: x + y, lambda x, y: x + y), "product": (lambda x, y: x * y - y, lambda x, y: x * y - y),
    "quotient": (lambda x, y: x / y, lambda x, y: x / y), "matrices": (lambda x, y: x @ y, lambda x, y: x @ y),
    "conjugates": (lambda x, y: ops.conj(x) * y, lambda x, y: x.conj() * y),
    "parts": (lambda x, y: ops.real(x) * ops.imag(y), lambda x, y: x.real * y.imag),
    "arguments": (lambda x, y: ops.angle(x) * abs(y), lambda x, y: x.angle() * y.abs()),
    "views": (lambda x, y: ops.view_as_complex(ops.view_as_real(x) * 2.0) * y, lambda x, y: torch.view_as_complex(
        torch.view_as_real(x) * 2.0) * y),
    "functions": (lambda x, y: ops.exp(x) * ops.sqrt(y) + ops.log(x), lambda x, y: x.exp() * y.sqrt() + x.log()),
    "shapes": (lambda x, y: ops.concatenate([x.T[1:, ::2], y.reshape(3, 3)[:2, :2]]).sum(0),
               lambda x, y: torch.cat([x.T[1:, ::2], y.reshape(3, 3)[:2, :2]]).sum(0)),
    "powers": (lambda x, y: x ** 2 * y.mean(), lambda x, y: x ** 2 * y.mean()),
}


MIXED = ("sum", "product", "quotient", "shapes", "powers")         # with a real number on one side, too


@pytest.mark.parametrize(("name", "dtypes"), [*((name, ("complex128", "complex128")) for name in PAIRS), *(
    (name, dtypes) for name in MIXED for dtypes in (("float64", "complex128"), ("complex64", "float32")))], ids=str)
def test_arithmetic_with_complex_numbers_equals_pytorch(name, dtypes):
    alike(*PAIRS[name], *(numbers(3, 3, dtype=d) for d in dtypes), tolerance=1e-5 if dtypes[0] == "complex64" else 1e-12)


def test_a_layer_of_a_fourier_neural_operator_trains_as_pytorchs():
    """Li et al. 2021: rfft2, complex weights (stored as pairs) on the lowest modes, irfft2, a loss, gradients."""
    x, pairs = RNG.standard_normal((2, 3, 8, 8)), RNG.standard_normal((3, 4, 5, 3, 2))

    def ours(x, pairs):
        weight, modes = ops.view_as_complex(pairs), ops.rfft2(x)[:, :, :5, :3]
        mixed = (modes[:, :, None] * weight[None]).sum(1)
        return ops.irfft2(ops.pad(mixed, (0, 2, 0, 3)), s=(8, 8))

    def theirs(x, pairs):
        weight, modes = torch.view_as_complex(pairs), torch.fft.rfft2(x)[:, :, :5, :3]
        mixed = torch.einsum("bixy,ioxy->boxy", modes, weight)
        return torch.fft.irfft2(torch.nn.functional.pad(mixed, (0, 2, 0, 3)), s=(8, 8))
    check(ours, theirs, x, pairs)


def test_shifts_and_frequencies_equal_pytorch():
    check(lambda x: ops.fftshift(x), torch.fft.fftshift, (5, 4))
    check(lambda x: ops.ifftshift(x, 0), lambda x: torch.fft.ifftshift(x, 0), (5, 4))
    for n in (1, 6, 7):
        np.testing.assert_allclose(ops.fftfreq(n, 0.5).array, torch.fft.fftfreq(n, 0.5).numpy(), rtol=1e-6)
        np.testing.assert_allclose(ops.rfftfreq(n, 0.5).array, torch.fft.rfftfreq(n, 0.5).numpy(), rtol=1e-6)


def test_what_takes_no_complex_numbers_refuses_them():
    z, x = numbers(3, 3), np.zeros((3, 3))
    cases = [
        (lambda: ops.relu(z), "expected float32 or float64"),
        (lambda: ops.maximum(z, z), "Maximum: an input is complex128, expected real"),
        (lambda: ops.rfft(z), "rfft: the input is complex128, expected real numbers; use fft"),
        (lambda: ops.imag(x), "imag: the input is float64, expected complex numbers"),
        (lambda: ops.view_as_complex(x), r"expected float32 or float64 \(..., 2\)"),
        (lambda: ops.fft(x, norm="none"), "norm is 'none', expected"), (lambda: ops.fft(x, n=0), "they must be at least 1"),
        (lambda: ops.fft(x, dim=2), "fft: dim 2 of an array with 2 dims"),
        (lambda: ops.fftn(x, s=(2,), dim=(0, 1)), "1 sizes .2,. for 2 dims"),
        (lambda: ops.fft(np.zeros(())), "fft: the input has no dims"), (lambda: ops.irfft(z[:, :1]), "transforms of length 0"),
        (lambda: ops.complex(x, x.astype("f")), "inputs of float64 and float32"),
    ]
    for call, message in cases:
        with pytest.raises(ShapeError, match=message):
            call()
