"""Results of several tensors, whose names are PyTorch's: tuples, to be unpacked or read by name."""

from __future__ import annotations

from typing import NamedTuple

from mpitrain.autograd import Tensor


class Places(NamedTuple):
    """Values, and where they came from (int64)."""

    values: Tensor
    indices: Tensor


class Range(NamedTuple):
    min: Tensor
    max: Tensor


class Orthogonal(NamedTuple):
    Q: Tensor
    R: Tensor


class Spectrum(NamedTuple):
    eigenvalues: Tensor
    eigenvectors: Tensor


class Singular(NamedTuple):
    U: Tensor
    S: Tensor
    Vh: Tensor


class SignAndLog(NamedTuple):
    sign: Tensor
    logabsdet: Tensor
