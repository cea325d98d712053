"""Tensor: an array, and the place it has in a graph of operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from mpitrain.autograd.values import DTYPES, of_values, without_dtype
from mpitrain.backend import Array, array_module, asnumpy, is_array, is_float
from mpitrain.errors import GraphError, ShapeError


class Node(Protocol):
    """The part of `Context`, the node that computed a tensor, that a tensor reads."""

    function: type[Any]


class Version:
    """Counts the changes of an array's values; shared by all tensors that show the same memory.

    `advice` says what to do where the change of number `advised` is one too many, as its author knows best.
    """

    count = advised = 0                           # Class attributes: many objects are made, and few are changed.
    advice = ""
    is_parameter = False

    def require(self, count: int, what: str) -> None:
        """GraphError where there were changes since this was `count`; `what` says what was read, and by whom."""
        if self.count != count:
            advice = self.advice if self.advised > count else "copy it before changing it"
            raise GraphError(f"{what} was changed in place ({self.count - count} changes since); {advice}")


class Elements(int):
    """The number of elements of a tensor. Calling it is PyTorch's way to the shape, and says so."""

    def __call__(self, *dim: Any) -> Any:
        raise ShapeError(f"x.size is the number of elements, {self}; PyTorch's x.size() is x.shape, and x.size(0) is x.shape[0]")


class Tensor:
    """An array that records what is computed from it.

    `array` is the storage itself, for those who write ops and optimizers: whoever changes it in place calls
    `mark_changed()`. `data` is the same memory, read-only. `grad` is a plain array, None until backward fills it; where
    `grad_buffer` is set, that is the memory it is filled in. Lists and numbers become float32, arrays keep their dtype.
    """

    __slots__ = ("__weakref__", "array", "edge", "grad", "grad_buffer", "grad_hooks", "requires_grad", "version")

    is_parameter = False                          # a trained leaf: backward in two calls does these in the second
    is_leaf_of_model = False                      # a parameter, or a buffer: it takes the format of activations beside it
    operands = ""                                 # the format that matrix products with it round their operands to; "": none
    array: Array
    backward: ClassVar[Callable[..., Any]]        # `engine.run_backward`, attached by the package: the engine imports this file

    def __init__(self, array: Any, requires_grad: bool = False):
        self.version: Version | None = None       # made when somebody first cares
        if type(array) is np.ndarray:             # by far the most frequent, and tensors are made for each op
            if array.dtype.char not in DTYPES:
                raise without_dtype(array.dtype)
        elif isinstance(array, Tensor):
            array, self.version = array.array, array.shared_version()
        elif not is_array(array):
            array = of_values(array)
        self.array = array
        self.grad: Array | None = None
        self.grad_buffer: Array | None = None     # where the first contribution is written, e.g. a view into a bucket
        self.grad_hooks: list[Callable[[Any], None]] = []   # called once per backward, when `grad` is final
        self.edge: tuple[Node, int] | None = None    # the node, and the number of its output; None for a leaf
        self.requires_grad = requires_grad
        if requires_grad is not False:
            if not isinstance(requires_grad, bool | np.bool_):
                raise ShapeError(f"Tensor: requires_grad is {requires_grad!r:.40}, expected True or False; Tensor takes values, "
                                 "and zeros of a shape are ops.zeros(2, 3)")
            if requires_grad and not (is_float(array.dtype) or array.dtype.kind == "c"):
                raise ShapeError(f"only floating-point and complex arrays have gradients, not {array.dtype}")

    @property
    def node(self) -> Any:
        """The `Context` that computed it; None for a leaf."""
        return None if self.edge is None else self.edge[0]

    @property
    def data(self) -> Array:
        """The values, read-only (a GPU array is handed out as it is: there is no read-only flag there)."""
        return read_only(self.array)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.array.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return Elements(math.prod(self.shape))

    @property
    def xp(self) -> Any:
        return array_module(self.array)

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        source = f", from {self.node.function.__name__}" if self.node else ", requires_grad" if self.requires_grad else ""
        return f"{type(self).__name__}({self.array}, dtype={self.dtype}{source})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """The values on the host, for NumPy functions and plots."""
        values = self.numpy()
        return values.astype(dtype) if dtype is not None and values.dtype != dtype else values.copy() if copy else values

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ShapeError(f"the truth of a tensor of shape {self.shape} is ambiguous; use (x > 0).array.any()")
        return bool(self.array)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self.dtype.kind not in "iu":
            raise ShapeError(f"a tensor of {self.dtype} stands where an integer is wanted; convert it, for instance with int(x)")
        return int(self)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The values on the host, read-only where they are the tensor's own memory."""
        return asnumpy(self.data)

    def item(self) -> float:
        """The one value of a tensor of size 1, as a Python number."""
        if self.size != 1:
            raise ShapeError(f"item() wants one value, this tensor has shape {self.shape}")
        return asnumpy(self.array).item()

    def detach(self) -> Tensor:
        """The same memory, outside the graph."""
        out = Tensor(self.array)
        out.version = self.shared_version()
        return out

    def zero_grad(self) -> None:
        self.grad = None

    def mark_changed(self, advice: str = "") -> None:
        """To be called after changing `array` in place: a backward that still needs the old values then raises.

        The error says `advice`: what to do about it.
        """
        version = self.shared_version()
        version.count += 1
        if advice:
            version.advice, version.advised = advice, version.count

    def shared_version(self) -> Version:
        if self.version is None:
            self.version = Version()
            if self.is_parameter:
                self.version.is_parameter = True
        return self.version

    if TYPE_CHECKING:                             # attached by `mpitrain.ops.operators`, the one table of operators
        def __add__(self, other: Any) -> Tensor: ...
        __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = __add__
        __matmul__ = __rmatmul__ = __getitem__ = __lt__ = __le__ = __gt__ = __ge__ = __add__
        def __neg__(self) -> Tensor: ...
        def __setitem__(self, index: Any, values: Any) -> None: ...
        def copy_(self, values: Any) -> Tensor: ...
        exp = log = tanh = sqrt = __neg__
        def sum(self, dim: Any = None, keepdim: bool = False) -> Tensor: ...
        mean = sum
        def reshape(self, *shape: Any) -> Tensor: ...
        transpose = reshape
        @property
        def T(self) -> Tensor: ...


def read_only(array: Array) -> Array:
    if array_module(array) is not np:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def _raw(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_raw(v) for v in value)
    return value.array if isinstance(value, Tensor) else value
