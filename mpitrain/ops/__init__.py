"""Every differentiable operation, once. Inputs are tensors, arrays or numbers; results are tensors.

Importing this package attaches the operators (``x + y``, ``x[i]``, ``x.sum()``) to Tensor.
"""

from mpitrain.ops.activation import gelu, leaky_relu, relu, sigmoid, silu, softplus, tanh
from mpitrain.ops.attention import scaled_dot_product_attention, self_attention
from mpitrain.ops.conv import conv2d, conv_transpose2d
from mpitrain.ops.dropout import dropout
from mpitrain.ops.elementwise import (
    absolute,
    add,
    clip,
    divide,
    equal,
    exp,
    greater,
    greater_equal,
    less,
    less_equal,
    log,
    maximum,
    minimum,
    multiply,
    negative,
    not_equal,
    power,
    sqrt,
    subtract,
    where,
)
from mpitrain.ops.experts import combine, dispatch, expert_balance, expert_gates, expert_linear
from mpitrain.ops.index import embedding, getitem, take
from mpitrain.ops.layer_norm import add_layer_norm, layer_norm, rms_norm
from mpitrain.ops.linalg import linear, matmul
from mpitrain.ops.loss import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    cross_entropy_count,
    element_count,
    huber,
    kl_divergence,
    l1,
    mse,
)
from mpitrain.ops.norm import batch_norm, batch_norm_inference, group_norm
from mpitrain.ops.operators import attach
from mpitrain.ops.pool import adaptive_avg_pool2d, adaptive_max_pool2d, avg_pool2d, max_pool2d, subsample2d
from mpitrain.ops.reduce import logsumexp, max, mean, min, sum, var
from mpitrain.ops.shape import (
    broadcast_to,
    concatenate,
    expand_dims,
    pad,
    reshape,
    split,
    squeeze,
    stack,
    swapaxes,
    transpose,
)
from mpitrain.ops.softmax import log_softmax, softmax

__all__ = [
    "absolute", "adaptive_avg_pool2d", "adaptive_max_pool2d", "add", "add_layer_norm", "avg_pool2d", "batch_norm",
    "batch_norm_inference", "binary_cross_entropy_with_logits", "broadcast_to", "clip", "combine", "concatenate", "conv2d",
    "conv_transpose2d", "cross_entropy", "cross_entropy_count", "dispatch", "divide", "dropout", "element_count", "embedding",
    "equal", "exp", "expand_dims", "expert_balance", "expert_gates", "expert_linear", "gelu", "getitem", "greater",
    "greater_equal", "group_norm", "huber", "kl_divergence", "l1", "layer_norm", "leaky_relu", "less", "less_equal", "linear",
    "log", "log_softmax", "logsumexp", "matmul", "max", "max_pool2d", "maximum", "mean", "min", "minimum", "mse", "multiply",
    "negative", "not_equal", "pad", "power", "relu", "reshape", "rms_norm", "scaled_dot_product_attention", "self_attention",
    "sigmoid", "silu", "softmax", "softplus", "split", "sqrt", "squeeze", "stack", "subsample2d", "subtract", "sum", "swapaxes",
    "take", "tanh", "transpose", "var", "where",
]

attach()
