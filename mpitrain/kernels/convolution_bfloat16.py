"""The products of convolutions on images of float32 whose numbers are rounded to bfloat16 first; sums and results stay float32.

Bits depend on shapes and values alone, on every CPU with the instruction; see native/convolution_bfloat16.c, also for what
becomes of numbers below 2^-126.
"""

from __future__ import annotations

from mpitrain.backend import Array
from mpitrain.kernels import convolution
from mpitrain.kernels.convolution import FORWARD, GRADIENT, Pair, Window, channel_sums
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import host
from mpitrain.kernels.product import rounded

LIBRARY = "convolution_bfloat16"


def _convolve(x: Array, weight: Array, bias: Array | None, window: Window, groups: int) -> Array:
    made: Array = convolution.convolve.reference(rounded(x), rounded(weight), bias, window, groups)
    return made


def _adjoint(y: Array, weight: Array, bias: Array | None, window: Window, groups: int, size: Pair) -> Array:
    made: Array = convolution.convolve_adjoint.reference(rounded(y), rounded(weight), bias, window, groups, size)
    return made


def _gradient(x: Array, y: Array, window: Window, groups: int, out: Array | None = None, bias_of: str = ""
              ) -> tuple[Array, Array | None]:
    weight, _ = convolution.kernel_gradient.reference(rounded(x), rounded(y), window, groups, out)
    return weight, channel_sums(x if bias_of == "x" else y) if bias_of else None


convolve_bfloat16 = Kernel("convolve_bfloat16", _convolve, host(
    LIBRARY, "forward_bfloat16", FORWARD.replace("X", "F"), answers=True)(convolution.run_forward))
"""As `convolve`, of float32; the bias is not rounded."""

convolve_adjoint_bfloat16 = Kernel("convolve_adjoint_bfloat16", _adjoint, host(
    LIBRARY, "adjoint_bfloat16", FORWARD.replace("X", "F"), answers=True)(convolution.run_adjoint))
"""As `convolve_adjoint`, of float32."""

kernel_gradient_bfloat16 = Kernel("kernel_gradient_bfloat16", _gradient, host(
    LIBRARY, "kernel_gradient_bfloat16", GRADIENT.replace("X", "F"), answers=True)(convolution.run_gradient))
"""As `kernel_gradient`, of float32; the sums over channels are of numbers that are not rounded."""
