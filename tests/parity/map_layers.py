"""Activations, norms and what layers are made of: entries of op_db and our functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from harness import Absent

from mpitrain import nn, ops
from mpitrain.autograd import Tensor

# hardsigmoid is tested in tests/ops/test_rectifiers.py: PyTorch's gradient of it has 1 / 6 in float32 for float64 inputs too.


def plain(op: Callable[..., Any], **names: str) -> Callable[..., Any]:
    """`op` without `inplace`, its arguments under PyTorch's `names`."""
    def call(*args: Any, inplace: bool = False, **kwargs: Any) -> Any:
        return op(*args, **{names.get(name, name): value for name, value in kwargs.items()})
    return call


def layer(make: Callable[..., nn.Module]) -> Callable[..., Any]:
    """A layer without parameters as a function of its arguments."""
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        return make(*args, **kwargs)(x)
    return call


def softmax(op: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Any, dim: int, dtype: Any = None) -> Any:
        if dtype is not None and x.dtype != dtype:
            raise Absent("dtype")
        return op(x, dim)
    return call


def rrelu(x: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False) -> Any:
    if training:
        raise Absent("random numbers of PyTorch's")
    return nn.RReLU(lower, upper).eval()(x)


def layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    return ops.layer_norm(x, np.ones(shape, x.dtype) if weight is None else weight, bias, eps=eps)


def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    return ops.rms_norm(x, np.ones(shape, x.dtype) if weight is None else weight,
                        eps=float(np.finfo(x.dtype).eps) if eps is None else eps)


def group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    return ops.group_norm(x, groups, weight, bias, eps=eps)


def batch_norm(x: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, training: bool = False, momentum: float = 0.1,
               eps: float = 1e-5) -> Any:
    if training or mean is None:
        return ops.batch_norm(x, weight, bias, eps=eps)[0]
    return ops.batch_norm_inference(x, mean, var, weight, bias, eps=eps)


def instance_norm(x: Any, mean: Any = None, var: Any = None, weight: Any = None, bias: Any = None, use_input_stats: bool = True,
                  momentum: float = 0.1, eps: float = 1e-5) -> Any:
    if not use_input_stats:
        return ops.batch_norm_inference(x, mean, var, weight, bias, eps=eps)
    return ops.group_norm(x, x.shape[1], weight, bias, eps=eps)


def bilinear(x: Any, z: Any, weight: Any, bias: Any = None) -> Any:
    made = nn.Bilinear(*weight.shape[1:], weight.shape[0])
    made.weight, made.bias = weight, bias
    return made(x, z)


def embedding(weight: Any, x: Any, max_norm: Any = None, **kwargs: Any) -> Any:
    if max_norm is not None or any(kwargs.values()):
        raise Absent("arguments of the layer")
    return ops.embedding(x, weight)


def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
              scale: float | None = None, enable_gqa: bool = False) -> Any:
    if dropout_p:
        raise Absent("random numbers of PyTorch's")
    return ops.scaled_dot_product_attention(q, k, v, causal=is_causal, scale=scale, mask=attn_mask, enable_gqa=enable_gqa)


def no_dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if training and p:
        raise Absent("random numbers of PyTorch's")
    return x if isinstance(x, Tensor) else Tensor(x)


def named(prefix: str, **functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {prefix + name: function for name, function in functions.items()}


MAP: dict[str, Callable[..., Any]] = {
    "softmax": softmax(ops.softmax), "log_softmax": softmax(ops.log_softmax), "sigmoid": ops.sigmoid,
    **named("nn.functional.", **{name: plain(getattr(ops, name)) for name in (
        "celu", "elu", "gelu", "glu", "hardswish", "mish", "relu", "relu6", "selu", "silu", "softsign",
        "tanhshrink")},
        hardshrink=plain(ops.hardshrink, lambd="width"), softshrink=plain(ops.softshrink, lambd="width"),
        hardtanh=plain(ops.hardtanh, min_val="low", max_val="high"), threshold=plain(ops.threshold, threshold="bound"),
        leaky_relu=plain(ops.leaky_relu, negative_slope="slope"), prelu=ops.prelu, rrelu=rrelu, logsigmoid=ops.log_sigmoid,
        softplus=plain(ops.softplus), softmin=softmax(ops.softmin),
        layer_norm=layer_norm, rms_norm=rms_norm, group_norm=group_norm, batch_norm=batch_norm, instance_norm=instance_norm,
        scaled_dot_product_attention=attention, local_response_norm=layer(nn.LocalResponseNorm),
        bilinear=bilinear, embedding=embedding, linear=ops.linear,
        pixel_shuffle=ops.pixel_shuffle, pixel_unshuffle=ops.pixel_unshuffle, channel_shuffle=ops.channel_shuffle,
        dropout=no_dropout, dropout2d=no_dropout, dropout3d=no_dropout,
        cosine_similarity=lambda x, z, dim=1, eps=1e-8: nn.CosineSimilarity(dim, eps)(x, z),
        pairwise_distance=lambda x, z, p=2.0, eps=1e-6, keepdim=False: nn.PairwiseDistance(p, eps, keepdim)(x, z)),
}
