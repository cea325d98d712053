"""The one table of operators and methods of Tensor: attached when `mpitrain.ops` is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mpitrain.autograd import Tensor
from mpitrain.backend import is_array, is_float
from mpitrain.errors import ArgumentError, GraphError, ShapeError
from mpitrain.ops import choice, comparison, elementwise, index, linalg, reduce, shape, writing
from mpitrain.ops.activation import tanh
from mpitrain.ops.inputs import door


def _swapped(op: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    def reflected(self: Any, other: Any) -> Tensor:
        return op(other, self)
    return reflected


def _later(name: str) -> Callable[..., Any]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(sys.modules[__package__], name)(self, *args, **kwargs)
    method.__name__ = method.__qualname__ = name
    return method


def _of_array(self: Tensor, ufunc: Any, method: str, *inputs: Any, out: tuple[Any, ...] = (), **named: Any) -> Tensor:
    """What array + tensor is: the operation on tensors, also for ``array += tensor``. Other functions of NumPy are refused."""
    name = ufunc.__name__
    if method == "__call__" and name in OF_ARRAYS.split() and not named and (not out or out[0] is inputs[0]):
        op: Callable[..., Tensor] = getattr(sys.modules[__package__], name)
        return op(*inputs)
    ops: Any = sys.modules[__package__]
    ours = f"ops.{name}(x), which has a gradient, or " if method == "__call__" and name in dir(ops) else ""
    raise ArgumentError(f"np.{name} of a tensor: write {ours}np.{name}(x.numpy())")


OF_ARRAYS = """
    add subtract multiply divide floor_divide remainder power matmul bitwise_and bitwise_or bitwise_xor less less_equal
    greater greater_equal equal not_equal"""

METHODS: dict[str, Any] = {
    "__add__": elementwise.add, "__radd__": _swapped(elementwise.add),
    "__sub__": elementwise.subtract, "__rsub__": _swapped(elementwise.subtract),
    "__mul__": elementwise.multiply, "__rmul__": _swapped(elementwise.multiply),
    "__truediv__": elementwise.divide, "__rtruediv__": _swapped(elementwise.divide),
    "__pow__": elementwise.power, "__rpow__": _swapped(elementwise.power), "__neg__": elementwise.negative,
    "__abs__": elementwise.absolute,
    "__floordiv__": _later("floor_divide"), "__rfloordiv__": _swapped(_later("floor_divide")),
    "__mod__": _later("remainder"), "__rmod__": _swapped(_later("remainder")),
    "__and__": _later("bitwise_and"), "__rand__": _swapped(_later("bitwise_and")),
    "__or__": _later("bitwise_or"), "__ror__": _swapped(_later("bitwise_or")),
    "__xor__": _later("bitwise_xor"), "__rxor__": _swapped(_later("bitwise_xor")), "__invert__": _later("bitwise_not"),
    "__matmul__": linalg.matmul, "__rmatmul__": _swapped(linalg.matmul),
    "__lt__": comparison.less, "__le__": comparison.less_equal,
    "__gt__": comparison.greater, "__ge__": comparison.greater_equal,
    "__getitem__": index.getitem, "__setitem__": writing.setitem, "copy_": writing.copy_,
    "__iter__": lambda self: (index.getitem(self, i) for i in range(len(self))),
    "sum": door(reduce.sum), "mean": door(reduce.mean), "reshape": door(shape.reshape), "transpose": door(shape.transpose),
    "exp": door(elementwise.exp), "log": door(elementwise.log), "sqrt": door(elementwise.sqrt), "tanh": door(tanh),
    "T": property(lambda self: shape.transpose(self)),
    "__array_ufunc__": _of_array,
    "__divmod__": lambda self, other: (self // other, self % other),
    "__rdivmod__": lambda self, other: (other // self, other % self),
    "__round__": lambda self, decimals=None: _later("round")(self, decimals or 0),
}

# Methods by the name of the op they are; the ops of files that are read later, among them.
LATER = """
    absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr adjoint all allclose aminmax angle any argmax argmin
    argsort argwhere asin asinh astype atan atan2 atanh baddbmm bincount bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor broadcast_to bucketize ceil cholesky cholesky_inverse cholesky_solve
    chunk clamp clip clone conj contiguous copysign corrcoef cos cosh count_nonzero cov cross cummax cummin cumprod
    cumsum deg2rad det diag diag_embed diagflat diagonal diagonal_scatter diff digamma divide dot dsplit equal erf erfc
    erfinv exp2 expand expand_as expand_dims expm1 flatten flip fliplr flipud floor floor_divide fmax fmin fmod frac
    gather gcd greater greater_equal hardshrink heaviside hsplit hypot index_add index_copy index_fill index_put
    index_reduce index_select inner is_complex isclose isfinite isin isinf isnan isneginf isposinf isreal kron kthvalue
    lcm ldexp lerp less less_equal lgamma log10 log1p log2 log_softmax logaddexp logaddexp2 logcumsumexp logdet
    logical_and logical_not logical_or logical_xor logit logsumexp masked_fill masked_scatter masked_select matmul
    matrix_exp matrix_power maximum median minimum movedim msort multiply mvlgamma nan_to_num nanmean nanmedian
    nanquantile nansum narrow negative new_full new_ones new_zeros nonzero norm not_equal outer permute positive power
    prelu prod qr quantile rad2deg ravel reciprocal relu remainder repeat repeat_interleave reshape_as roll rot90 round
    rsqrt scatter scatter_add scatter_reduce select select_scatter sgn sigmoid sign signbit sin sinc sinh slice_scatter
    slogdet softmax sort split square squeeze std subtract sum_to_size swapaxes t take_along_dim tan tensor_split tile
    topk trace tril triu trunc unbind unflatten unfold unique unique_consecutive var vdot vsplit xlogy"""

# What PyTorch calls an op that has another name here; both names are of one function.
PYTORCH_NAMES = {
    "abs": "absolute", "amax": "max", "amin": "min", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh",
    "arctan": "atan", "arctan2": "atan2", "arctanh": "atanh", "bmm": "matmul", "cat": "concatenate", "concat": "concatenate",
    "div": "divide", "eq": "equal", "ge": "greater_equal", "gt": "greater", "le": "less_equal", "lt": "less", "mm": "matmul",
    "fix": "trunc", "inverse": "inv", "moveaxis": "movedim", "mul": "multiply", "mv": "matmul", "ne": "not_equal",
    "neg": "negative", "pow": "power", "sub": "subtract", "swapdims": "swapaxes", "to": "astype",
    "trapz": "trapezoid", "true_divide": "divide", "unsqueeze": "expand_dims", "view": "reshape", "view_as": "reshape_as",
}

# Methods that make a tensor of another dtype, by PyTorch's names.
CASTS = {"bool": "bool", "byte": "uint8", "cdouble": "complex128", "cfloat": "complex64", "char": "int8", "double": "float64",
         "float": "float32", "int": "int32", "long": "int64", "short": "int16"}

# What changes a tensor in place in PyTorch, each method with an underscore among it: a backward would need the old values.
IN_PLACE = {*LATER.split(), *PYTORCH_NAMES, "exp", "log", "polygamma", "sqrt", "tanh", "transpose"}
FILLS = "bernoulli cauchy exponential fill geometric log_normal normal random uniform zero"


def _refused(name: str) -> Callable[..., Any]:
    way = (f"x = x.{name}(...) makes a new one" if name in IN_PLACE else
           "x.copy_(values) under no_grad() overwrites one that no backward needs, and mpitrain.nn.init has initial values")

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise GraphError(f"{name}_: operations do not change tensors in place; {way}")
    method.__name__ = method.__qualname__ = f"{name}_"
    return method


def _equals(op: Callable[[Any, Any], Tensor], otherwise: bool) -> Callable[[Any, Any], Any]:
    """Element by element beside numbers, arrays and tensors; None and the like are just not equal."""
    def method(self: Tensor, other: Any) -> Any:
        return op(self, other) if isinstance(other, Tensor | bool | int | float) or is_array(other) or isinstance(
            other, list) else otherwise
    return method


def _extremum(name: str, pairwise: Callable[[Any, Any], Tensor]) -> Callable[..., Any]:
    """As PyTorch's methods: one value of all; along a dim values and indices; with another tensor the larger of both."""
    @door
    def method(self: Tensor, dim: Any = None, keepdim: bool = False) -> Any:
        if isinstance(dim, Tensor):
            return pairwise(self, dim)
        return getattr(reduce, name)(self) if dim is None else _later(f"{name}_with_index")(self, dim, keepdim)
    method.__name__ = method.__qualname__ = name
    return method


def unknown(self: Tensor, name: str) -> Any:
    """Called where a tensor has no such attribute: says what PyTorch's is here."""
    from mpitrain.ops.pytorch import OPS, TENSOR, UnknownName  # few names are wrong
    if hasattr(type(self), name):
        return object.__getattribute__(self, name)         # a property whose own lines failed: its error
    raise UnknownName("a tensor", name, {**OPS, **TENSOR})


def _format(self: Tensor, spec: str) -> str:
    """One value as a number is formatted; others only as they are printed."""
    if not spec:
        return str(self)
    if self.size != 1:
        raise ShapeError(f"format {spec!r} of a tensor of shape {self.shape}, expected one value; format x.tolist()")
    return format(self.item(), spec)


def _requires_grad(self: Tensor, requires_grad: bool = True) -> Tensor:
    """Makes a leaf that has a gradient from here on, or has none; the tensor itself is returned."""
    if self.edge is not None:
        raise GraphError("requires_grad_: the tensor is the result of an operation, no leaf; x.detach() is outside the graph")
    if requires_grad and self.dtype.kind != "c" and not is_float(self.dtype):
        raise ShapeError(f"requires_grad_: only floating-point and complex arrays have gradients, not {self.dtype}")
    self.requires_grad = requires_grad
    return self


METHODS |= {
    "__getattr__": unknown, "__format__": _format, "requires_grad_": _requires_grad,
    "__eq__": _equals(comparison.equal, False), "__ne__": _equals(comparison.not_equal, True), "__hash__": object.__hash__,
    "max": _extremum("max", choice.maximum), "min": _extremum("min", choice.minimum),
    "where": lambda self, condition, other: choice.where(condition, self, other),
    "polygamma": lambda self, n: _later("polygamma")(n, self),
    "real": property(_later("real")), "imag": property(_later("imag")), "mH": property(_later("adjoint")),
    "__pos__": _later("positive"), "__round__": _later("round"),
    "mT": property(lambda self: shape.swapaxes(self, -1, -2)), "dim": lambda self: self.ndim, "numel": lambda self: self.size,
    "tolist": lambda self: self.numpy().tolist(), "type_as": lambda self, other: _later("astype")(self, other.dtype),
    **{name: (lambda self, dtype=dtype: _later("astype")(self, dtype)) for name, dtype in CASTS.items()},
    **{f"{name}_": _refused(name) for name in (*IN_PLACE, *FILLS.split())},
}


def attach() -> None:
    for name in (*LATER.split(), *PYTORCH_NAMES):
        setattr(Tensor, name, _later(name))
    for name, method in METHODS.items():
        setattr(Tensor, name, method)
