"""Losses with PyTorch's arguments, as compositions of operations: they have derivatives of every order.

`reduction` is "mean" (the default), "sum" or "none". Shapes must be equal where they mean the same thing: broadcasting would
change the number of terms without a word. Classes are along `dim` (1, as PyTorch has them; of a single row 0).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.backend import Array, array_module, is_array, is_float
from mpitrain.backend import constant as once
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.ops.activation import log_softmax, softplus
from mpitrain.ops.choice import clip, where
from mpitrain.ops.elementwise import absolute, exp, log, power
from mpitrain.ops.index import getitem
from mpitrain.ops.inputs import as_tensor, check_number, dim_of, raw
from mpitrain.ops.loss import check_labels
from mpitrain.ops.reduce import mean, sum
from mpitrain.ops.shape import expand_dims, swapaxes
from mpitrain.ops.unary import expm1

__all__ = ["binary_cross_entropy", "binary_cross_entropy_with_logits_loss", "cross_entropy_loss", "dice_loss", "focal_loss",
           "gaussian_nll_loss", "huber_loss", "kl_div", "l1_loss", "mse_loss", "nll_loss", "poisson_nll_loss",
           "smooth_l1_loss"]


def reduced(terms: Tensor, reduction: str, count: float | Array | None = None) -> Tensor:
    """The terms, their sum, or that over `count` (default: their number), which may be a number that a device has."""
    if reduction == "none":
        return terms
    if reduction == "sum":
        return sum(terms)
    if reduction != "mean":
        raise ConfigError(f'reduction is "none", "mean" or "sum", not "{reduction}"')
    if count is not None and is_array(count):
        return sum(terms) * Tensor(array_module(count).where(count == 0, math.nan, 1.0 / count).astype(terms.dtype))
    return mean(terms) if count is None else sum(terms) * (1.0 / count if count else math.nan)


def total(weights: Array) -> float | Array:
    """The sum of labels' weights, that a mean divides by: of a device an array, which nobody waits for."""
    return float(weights.sum()) if type(weights) is np.ndarray else weights.sum(dtype="float64")


def pair(name: str, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Both as tensors of one shape; integers and booleans beside floats become those."""
    x, y = as_tensor(x), as_tensor(y)
    if not is_float(x.dtype) or not is_float(y.dtype):
        x, y = (t if is_float(t.dtype) else Tensor(t.array.astype(other.dtype if is_float(other.dtype) else "float32"))
                for t, other in ((x, y), (y, x)))
    if x.shape != y.shape:
        raise ShapeError(f"{name}: shapes {x.shape} and {y.shape} differ; they must be equal")
    return x, y


def constant(x: Tensor, values: Any) -> Array:
    """`values` as an array beside x, of its dtype. ShapeError where they are no real numbers."""
    given = raw(values)
    try:
        if getattr(getattr(given, "dtype", None), "kind", "f") not in "biuf":
            raise TypeError
        if is_array(given) or x.dtype.kind == "V":
            return array_module(x.array).asarray(given, dtype=x.dtype)
        return once(array_module(x.array), np.asarray(given, x.dtype))            # of numbers, which a device gets once
    except (TypeError, ValueError):
        raise ShapeError(f"a loss wants a real number or an array of them beside its input, found {str(given)[:60]!r}") from None


def class_weights(name: str, x: Tensor, weight: Any) -> Array:
    """`weight`, a number for each class of x (..., C), as an array beside x."""
    each, classes = constant(x, weight), x.shape[-1]
    if each.shape != (classes,):
        raise ShapeError(f"{name}: weights of shape {each.shape} for {classes} classes; give one for each")
    return each


def distance(name: str, x: Any, y: Any) -> Tensor:
    x, y = pair(name, x, y)
    return x - y


def mse_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    """(input - target)^2."""
    d = distance("mse_loss", input, target)
    return reduced(d * d, reduction)


def l1_loss(input: Any, target: Any, reduction: str = "mean") -> Tensor:
    """|input - target|."""
    return reduced(absolute(distance("l1_loss", input, target)), reduction)


def huber_loss(input: Any, target: Any, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """Half the square up to `delta`, a straight line of slope `delta` from there (Huber, 1964)."""
    if not delta > 0:
        raise ConfigError(f"the delta of huber_loss is more than 0, not {delta}")
    d = distance("huber_loss", input, target)
    inside = clip(d, -delta, delta)
    return reduced(inside * (d - inside * 0.5), reduction)


def smooth_l1_loss(input: Any, target: Any, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """Half the square over `beta` where the difference is smaller, a straight line of slope 1 from there (Girshick, 2015)."""
    if beta < 0:
        raise ConfigError(f"the beta of smooth_l1_loss is 0 or more, not {beta}")
    return l1_loss(input, target, reduction) if beta == 0 else huber_loss(input, target, reduction, beta) * (1.0 / beta)


def kl_div(input: Any, target: Any, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """p (log p - input) for the target p, or its logarithm; "batchmean" divides the sum by the rows, as the divergence wants."""
    x, t = pair("kl_div", input, target)
    if log_target:
        terms = exp(t) * (t - x)
    else:
        nothing = t.array == 0
        terms = where(nothing, constant(x, 0.0), t * (log(where(nothing, constant(x, 1.0), t)) - x))
    if reduction == "batchmean":
        return reduced(terms, "mean", x.shape[0] if x.shape else 1)
    return reduced(terms, reduction)


def binary_cross_entropy(input: Any, target: Any, weight: Any = None, reduction: str = "mean") -> Tensor:
    """-t log p - (1 - t) log(1 - p) of probabilities; logarithms are at least -100."""
    p, t = pair("binary_cross_entropy", input, target)
    terms = -(t * _bounded_log(p) + (1 - t) * _bounded_log(1 - p))
    return reduced(terms if weight is None else terms * constant(p, weight), reduction)


def _bounded_log(p: Tensor) -> Tensor:
    """log p, at least -100; the gradient is 0 where that bounds it (that of log at 0 is inf, and 0 times inf no number)."""
    low = p.array < math.exp(-100.0)
    return where(low, constant(p, -100.0), log(where(low, constant(p, 1.0), p)))


def binary_cross_entropy_with_logits_loss(input: Any, target: Any, weight: Any = None, reduction: str = "mean",
                                          pos_weight: Any = None) -> Tensor:
    """-w t log s(x) - (1 - t) log(1 - s(x)), s the sigmoid; `pos_weight` is w, the weight of what is there (broadcast)."""
    x, t = pair("binary_cross_entropy_with_logits", input, target)
    more = 0.0 if pos_weight is None else constant(x, pos_weight) - 1
    terms = (1 - t) * x + (t * more + 1 if pos_weight is not None else 1.0) * softplus(-x)
    return reduced(terms if weight is None else terms * constant(x, weight), reduction)


def last(name: str, x: Any, dim: int) -> Tensor:
    """x with the classes in its last dim."""
    x = as_tensor(x)
    at = dim_of(name, x, dim if len(x.shape) > 1 else 0)
    for d in range(at, len(x.shape) - 1):
        x = swapaxes(x, d, d + 1)
    return x


def labelled(name: str, x: Tensor, target: Any, ignore: int | None) -> tuple[Any, Array]:
    """The labels as flat int64, 0 where ignored, and which of them count; x (..., C).

    Others outside 0 ... C-1 are refused; on a device, which would have to be waited for, they are -1, and `picked` gives NaN.
    """
    labels = array_module(x.array).asarray(raw(target))
    if labels.dtype.kind not in "iu" or labels.shape != x.shape[:-1]:
        raise ShapeError(f"{name}: {x.shape[-1] if x.shape else 0} classes of shape {x.shape} want integer labels of shape "
                         f"{x.shape[:-1]}, found {labels.dtype} of shape {labels.shape}")
    flat = labels.reshape(-1).astype("int64")
    on_host = type(flat) is np.ndarray
    if on_host:
        check_labels(flat, x.shape[-1], ignore, labels)
    counted = flat == flat if ignore is None else flat != ignore
    chosen = flat * counted
    return chosen if on_host else array_module(flat).where((chosen < 0) | (chosen >= x.shape[-1]), -1, chosen), counted


def picked(x: Tensor, labels: Any) -> Tensor:
    """Of x (..., C), the number of each row's label, flat."""
    rows = x.reshape(len(labels), x.shape[-1])
    found = getitem(rows, (array_module(x.array).arange(len(labels)), labels))
    return found if type(labels) is np.ndarray else where(labels < 0, constant(x, math.nan), found)


def nll_loss(input: Any, target: Any, weight: Any = None, ignore_index: int | None = -100, reduction: str = "mean", *,
             dim: int = 1) -> Tensor:
    """-w[label] input[label], for log-probabilities; the mean divides by the sum of the weights of the labels that count."""
    return labels_loss("nll_loss", last("nll_loss", input, dim), target, weight, ignore_index, reduction, 0.0)


def labels_loss(name: str, log_p: Tensor, target: Any, weight: Any, ignore: int | None, reduction: str, smoothing: float
                ) -> Tensor:
    if not log_p.shape:
        raise ShapeError(f"{name}: the input has no dim of classes")
    labels, counted = labelled(name, log_p, target, ignore)
    classes = log_p.shape[-1]
    each = class_weights(name, log_p, [1.0] * classes if weight is None else weight)
    zero, own = constant(log_p, 0.0), each[labels] * counted
    terms = where(counted, -picked(log_p, labels) * own, zero)
    if smoothing:
        spread = sum(-(log_p.reshape(len(labels), classes) * each), 1)
        terms = terms * (1 - smoothing) + where(counted, spread, zero) * (smoothing / classes)
    return reduced(terms.reshape(log_p.shape[:-1]), reduction, total(own) if reduction == "mean" else None)


def cross_entropy_loss(input: Any, target: Any, weight: Any = None, ignore_index: int | None = -100, reduction: str = "mean",
                       label_smoothing: float = 0.0, *, dim: int = 1) -> Tensor:
    """-log softmax(input)[label], with class weights; a target of floats gives the probability of each class instead."""
    check_number("cross_entropy_loss", "label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"the label_smoothing of cross_entropy_loss lies in [0, 1], not {label_smoothing}")
    log_p = log_softmax(last("cross_entropy_loss", input, dim))
    if as_tensor(target).dtype.kind in "iu":
        return labels_loss("cross_entropy_loss", log_p, target, weight, ignore_index, reduction, label_smoothing)
    if ignore_index is not None and ignore_index >= 0:
        raise ConfigError(f"cross_entropy_loss: ignore_index is {ignore_index}, and the target has probabilities, not labels; "
                          "leave it out")
    log_p, p = pair("cross_entropy_loss", log_p, last("cross_entropy_loss", target, dim))
    if label_smoothing:
        p = p * (1 - label_smoothing) + label_smoothing / p.shape[-1]
    terms = p * log_p
    return reduced(-sum(terms if weight is None else terms * class_weights("cross_entropy_loss", log_p, weight), -1),
                   reduction)


def focal_loss(input: Any, target: Any, gamma: float = 2.0, weight: Any = None, ignore_index: int | None = -100,
               reduction: str = "mean", *, dim: int = 1) -> Tensor:
    """-w[label] (1 - p)^gamma log p of the label's probability p = softmax(input)[label] (Lin et al., 2017).

    The mean divides by the number of labels that count. Where p is 1 the gradient is 0, its limit for every gamma above 0.
    """
    check_number("focal_loss", "gamma", gamma)
    if not 0 <= gamma < math.inf:
        raise ConfigError(f"the gamma of focal_loss is a finite number, 0 or more, not {gamma}")
    log_p = log_softmax(last("focal_loss", input, dim))
    labels, counted = labelled("focal_loss", log_p, target, ignore_index)
    own = picked(log_p, labels)
    sure, zero = own.array >= 0, constant(log_p, 0.0)         # p is 1: the power's own slope there is infinite for gamma below 1
    terms = where(sure, zero, power(where(sure, zero + 1, -expm1(own)), gamma) * -own) if gamma else -own
    if weight is not None:
        terms = terms * class_weights("focal_loss", log_p, weight)[labels]
    found = where(counted, terms, zero).reshape(log_p.shape[:-1])
    return reduced(found, reduction, total(counted) if reduction == "mean" else None)


def dice_loss(input: Any, target: Any, eps: float = 1.0, reduction: str = "mean") -> Tensor:
    """1 - (2 sum(p t) + eps) / (sum(p) + sum(t) + eps) of each sample (dim 0), for probabilities (Milletari et al., 2016)."""
    p, t = pair("dice_loss", input, target)
    if not p.shape:
        raise ShapeError("dice_loss: the input has no dim of samples")
    p, t = (x.reshape(x.shape[0], math.prod(x.shape[1:])) for x in (p, t))
    return reduced(1 - (sum(p * t, 1) * 2 + eps) / (sum(p, 1) + sum(t, 1) + eps), reduction)


def poisson_nll_loss(input: Any, target: Any, log_input: bool = True, full: bool = False, eps: float = 1e-8,
                     reduction: str = "mean") -> Tensor:
    """exp(x) - t x, or x - t log(x + eps); `full` adds Stirling's t log t - t + log(2 pi t) / 2 where t > 1."""
    x, t = pair("poisson_nll_loss", input, target)
    terms = exp(x) - t * x if log_input else x - t * log(x + eps)
    if full:
        safe = where(t.array > 1, t, constant(x, 1.0))
        stirling = safe * log(safe) - safe + log(safe * (2 * math.pi)) * 0.5
        terms = terms + where(t.array > 1, stirling, constant(x, 0.0))
    return reduced(terms, reduction)


def gaussian_nll_loss(input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
                      ) -> Tensor:
    """(log v + (input - target)^2 / v) / 2, v = max(var, eps), whose gradient passes; `full` adds log(2 pi) / 2.

    `var` has the input's shape, that without the last dim or with 1 there, or is a number.
    """
    x, t = pair("gaussian_nll_loss", input, target)
    v = as_tensor(var) if not isinstance(var, int | float) else Tensor(constant(x, [var]).reshape((1,) * len(x.shape)))
    if v.shape != x.shape and v.shape == x.shape[:-1]:
        v = expand_dims(v, -1)
    if len(v.shape) != len(x.shape) or any(n not in (m, 1) for n, m in zip(v.shape, x.shape)):
        raise ShapeError(f"gaussian_nll_loss: variances of shape {v.shape} for an input of shape {x.shape}")
    if type(v.array) is not np.ndarray:                       # a device would have to be waited for: the loss is NaN
        v = where(v.array < 0, constant(v, math.nan), v)
    elif (v.array < 0).any():
        raise ShapeError("gaussian_nll_loss: a variance is less than 0; give exp or softplus of the model's output")
    v = v + array_module(x.array).maximum(constant(x, eps) - v.array, constant(x, 0.0))
    d = x - t
    terms = (log(v) + d * d / v) * 0.5
    return reduced(terms + 0.5 * math.log(2 * math.pi) if full else terms, reduction)
