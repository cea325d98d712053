"""Kernels on a GPU: the device versions of `mpitrain.kernels`, in files that are imported when a device array first asks.

    ROWS = Source("layer_norm")                                          # native/device/layer_norm.cu
    _row_norm = ROWS.function("row_norm", "X:rn X!:rn d ir in")          # its kernels row_norm_float32, ..., and what they take

    @device("row_norm")                                                  # the version of KERNELS["row_norm"]
    def row_norm(x, eps):
        x = contiguous(x)
        y = array_module(x).empty(x.shape, x.dtype)
        _row_norm((len(x),), 256, x, y, eps, *x.shape)                   # grid, threads of a block, arguments
        return y
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

FILES: dict[str, str] = {
    **dict.fromkeys(("relu", "tanh", "sigmoid", "gelu", "gelu_tanh", "silu", "gelu_and_slope", "gelu_tanh_and_slope",
                     "silu_and_slope", "relu_grad", "tanh_grad", "sigmoid_grad", "slope_grad"), "pointwise"),
    "column_sums": "sums",
    "product": "product",
    **dict.fromkeys(("linear", "linear_gradients"), "linear"),
    **dict.fromkeys(("random_words", "random_uniform", "random_normal"), "random"),
    **dict.fromkeys(("dropout", "dropout_grad"), "dropout"),
    **dict.fromkeys(("row_norm", "row_norm_gradients"), "layer_norm"),
    "rotary": "rotary",
    "stored_rows": "feed",
    **dict.fromkeys(("sgd", "sgd_momentum", "sgd_dampened", "adam", "amsgrad", "lamb", "rmsprop", "rmsprop_centered",
                     "square_sums", "conclude_norm"), "optimizer"),
    **dict.fromkeys(("window_maximum", "window_maximum_gradient", "window_total", "window_total_gradient", "subsample",
                     "subsample_gradient"), "pool"),
    **dict.fromkeys(("channel_moments", "channel_affine", "channel_sums", "channel_combine", "batch_norm",
                     "batch_norm_gradients", "move_running"), "batch_norm"),
    **dict.fromkeys(("convolve", "convolve_adjoint", "kernel_gradient"), "convolution"),
    **dict.fromkeys(("row_sums", "variances"), "moments"),
    **dict.fromkeys(("softmax", "softmax_grad", "log_softmax", "log_softmax_grad"), "rows"),
    **dict.fromkeys(("cross_entropy", "cross_entropy_grad"), "rows"),
    **dict.fromkeys(("take_rows", "scatter_add_rows"), "tables"),
    **dict.fromkeys(("attention_weights", "attention_weights_gradient"), "attention_weights"),
    **dict.fromkeys(("flash_attention", "flash_attention_grad", "join_attention"), "attention"),
    "cached_attention": "decode",
    **dict.fromkeys(("lowbit_int8", "lowbit_int4"), "lowbit"),
}
"""The file of this folder with the device version of a kernel, by the kernel's name. Kernels without one run as expressions."""

VERSIONS: dict[str, Callable[..., Any]] = {}


def device(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function the device version of the kernel of that name."""
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        assert name in FILES and name not in VERSIONS, f"kernel {name!r} has no file in FILES, or two versions"
        VERSIONS[name] = function
        return function
    return register


def version_of(name: str) -> Callable[..., Any] | None:
    """The device version of a kernel, None where it has none."""
    if name in FILES and name not in VERSIONS:
        import_module(f"mpitrain.kernels.device.{FILES[name]}")
    return VERSIONS.get(name)
