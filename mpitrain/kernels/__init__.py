"""Compiled loops (native C, Numba), each beside the plain-array expression it must equal."""

from mpitrain.kernels.kernel import KERNELS, Kernel, compiled

__all__ = ["KERNELS", "Kernel", "compiled"]
