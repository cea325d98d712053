"""Function: what the author of an operation writes; Context: one use of it, a node of the graph.

    class Multiply(Function):
        "x * y, elementwise."
        broadcasts = True                                   # the engine sums gradients back to the input shapes

        @staticmethod
        def forward(ctx, x, y):
            ctx.save(x, y)
            return x * y

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved
            return (grad * y if ctx.needs[0] else None,     # only what is asked for
                    grad * x if ctx.needs[1] else None)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mpitrain.autograd.tensor import Tensor, Version, mode
from mpitrain.backend import Array, array_module, is_array
from mpitrain.errors import GraphError, ShapeError

_sequence = itertools.count(1)                    # program order: the only thing the order of backward depends on


class Context:
    """One use of a Function: what it saved for backward, and the edges to what it was computed from.

    An edge is a leaf tensor, or the (node, output) that made the input, or None where no gradient can flow. The input
    tensors themselves are not kept, so an activation that no op saved is freed at once.
    """

    __slots__ = ("__dict__", "_saved", "_watched", "edges", "function", "grads", "landed", "leaf_meta", "needs", "out_requests",
                 "output_meta", "passed", "sequence", "wanted", "xp")

    needs: tuple[bool, ...]                       # which inputs' gradients this call of backward must return
    # set where the graph is recorded only:
    sequence: int
    edges: list[Any]
    wanted: tuple[bool, ...]                      # which inputs have a gradient at all
    leaf_meta: list[Any]                          # (shape, dtype) of each of those that is a leaf
    output_meta: list[Any]                        # (shape, dtype)
    grads: list[Array | None]                     # gradients of the outputs that have arrived
    landed: set[int] | None                       # leaves whose contribution a recomputed block has landed already
    out_requests: Any                             # the engine's answer to `out`
    passed: bool                                  # a backward has come here, and what it needed is, or will be, released

    def __init__(self, function: type[Function], xp: Any, needs: tuple[bool, ...]):
        self.function: Any = function                      # an op may have attributes of its own
        self.xp, self.needs = xp, needs
        self._saved: Sequence[Any] | None = ()
        self._watched: Sequence[tuple[int, Version, int, bool]] = ()    # see `watch`

    if TYPE_CHECKING:                             # an op may keep what it likes as attributes: ctx.stride = stride
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def save(self, *arrays: Any) -> None:
        """Keeps arrays (or anything else) for backward, in `saved`. In forward only.

        A parameter is kept by reference and looked up again at backward, since sharded parameters come and go.
        """
        self._saved = (*self._saved, *arrays) if self._saved else arrays

    def watch(self, arrays: list[Any], tensors: tuple[Any, ...]) -> None:
        """From now on a change of what was saved is noticed, where that is one of `arrays`, those of `tensors`."""
        saved, watched = [*(self._saved or ())], []
        place = -1                                # counted by hand, here and below: enumerate takes longer than the loop
        for kept in saved:
            place += 1
            at = -1
            for array in arrays:
                at += 1
                if array is kept and isinstance(tensor := tensors[at], Tensor):
                    version = tensor.version
                    if version is None:
                        version = tensor.shared_version()
                    watched.append((place, version, version.count, tensor.is_parameter))
                    if tensor.is_parameter:
                        saved[place] = tensor
                    break
        self._saved, self._watched = saved, watched

    @property
    def saved(self) -> list[Any]:
        """What forward saved. Raises GraphError where it has changed since, or was released."""
        if self._saved is None:
            self.refuse()
        saved = [*self._saved]
        for place, version, count, is_parameter in self._watched:
            if version.count != count:
                version.require(count, f"{self.function.__name__}: an array it saved for backward")
            if is_parameter:
                saved[place] = saved[place].array
        return saved

    def refuse(self) -> NoReturn:
        raise GraphError(f"{self.function.__name__}: backward ran twice through the same graph; "
                         "what it saved was released the first time, so run forward again")

    def release(self) -> None:
        self._saved = None
        self.__dict__.clear()

    def out(self, i: int) -> Array | None:
        """In backward: memory where the gradient of input i may be written directly, or None.

        It is the bucket's memory of a leaf whose first contribution this is: a product can be written where it will
        be sent from. Whoever takes it must fill it and return it.
        """
        return self.out_requests(self, i) if self.out_requests is not None else None


class Function:
    """One differentiable operation: arrays in, one array (or a tuple of arrays) out; metadata by keyword.

    `broadcasts`: the gradients are summed back to the shapes of the inputs. `views`: the output shows the input's memory.
    `result_dtype`: set where the result is meant to have another dtype than the floating-point inputs. `floats`: how many of the
    first inputs must be float32 or float64, since compiled code reads them; the others may be labels, indices or masks.
    `makes_floats`: integers and booleans become float32 first, PyTorch's default (NumPy would make float16 of bytes).
    `recorded`: False for what is no operation of a program but only stands around some (see `autograd.record`).
    """

    broadcasts = False
    views = False
    result_dtype: Any = None
    floats = 0
    makes_floats = False
    recorded = True

    @staticmethod
    def forward(ctx: Context, *arrays: Any, **params: Any) -> Any:
        raise GraphError("a Function defines forward")

    @staticmethod
    def backward(ctx: Context, *grads: Any) -> Any:
        """Gradients of the inputs, None where `ctx.needs` is False; one argument per output.

        May be called twice for one node, with different `ctx.needs`: activations first, parameters later.
        """
        raise GraphError("a Function defines backward")

    @classmethod
    def apply(cls, *inputs: Any, **params: Any) -> Any:
        """Runs the operation, and records it where an input requires a gradient.

        Inputs are tensors, arrays or numbers. Raises ShapeError where arrays live on different devices, mix float dtypes (a
        silent promotion to float64 would halve the speed of everything after it), or are no floats where some are wanted.
        Every operation of every step comes through here, so the checks of an input stand inline: a call for each of them would
        cost more than the check.
        """
        arrays: list[Any] = []
        edges: list[Any] = []
        leaf_meta: list[Any] = []
        needs: list[bool] = []
        xp = dtype = None
        for x in inputs:
            edge: Any = None
            meta: Any = None
            if isinstance(x, Tensor):
                tensor, x = x, x.array
                if tensor.requires_grad:
                    edge = tensor.edge
                    if edge is None:
                        edge, meta = tensor, (x.shape, x.dtype)
            try:
                module = _modules[type(x)]
            except KeyError:
                module = _module_of(x)
            if module is not None:
                if module is not xp:
                    xp = module if xp is None else _refuse(cls, (
                        f"one input is on {_place(xp)}, another on {_place(module)}; move them to one device first"))
                kind = x.dtype            # below: a comparison takes None for float64, NumPy's default
                if kind is not dtype and (dtype is None or kind != dtype):
                    if len(arrays) < cls.floats and (kind.char not in "fd" or not kind.isnative):
                        _refuse(cls, f"an input is {kind}, expected float32 or float64; convert it first")
                    if kind.kind == "f":
                        dtype = kind if dtype is None else _refuse(
                            cls, f"inputs of {dtype} and {kind}; convert one of them first")
                    elif cls.makes_floats and kind.kind in "iub":
                        x = x.astype("float32")
            arrays.append(x)
            edges.append(edge)
            leaf_meta.append(meta)
            needs.append(edge is not None)
        recording = True in needs and mode.recording
        ctx = Context(cls, xp if xp is not None else array_module(), tuple(needs) if recording else (False,) * len(needs))
        try:
            result = cls.forward(ctx, *arrays, **params)
        except _OF_ARRAYS as error:
            raise ShapeError(_explained(cls, arrays, error)) from error
        several = type(result) is tuple
        wanted = cls.result_dtype if cls.result_dtype is not None else dtype
        outputs: tuple[Tensor, ...] = tuple([_as_output(cls, x, wanted, ctx.xp) for x in result]) if several else (
            _as_output(cls, result, wanted, ctx.xp),)
        if cls.views and isinstance(inputs[0], Tensor):
            version = inputs[0].shared_version()
            for tensor in outputs:
                tensor.version = version
        if recording:
            ctx.edges, ctx.leaf_meta = edges, leaf_meta
            _record(ctx, arrays, inputs, outputs)
        if mode.recorder is not None:
            mode.recorder(cls, inputs, params, outputs)
        return outputs if several else outputs[0]


_modules: dict[type, Any] = {}                    # array module of each type met so far, None for what is no array


def _module_of(value: Any) -> Any:
    found = _modules[type(value)] = array_module(value) if is_array(value) else None
    return found


_OF_ARRAYS = (TypeError, ValueError, IndexError, AttributeError, ArithmeticError)     # what NumPy says where arrays do not fit


def _explained(cls: type[Function], arrays: list[Any], error: Exception) -> str:
    """What an array library said, in one line, with the operation and its inputs."""
    found = ", ".join(f"{x.dtype} {x.shape}" if _module_of(x) is not None else repr(x)[:40] for x in arrays)
    return f"{cls.__name__}: {' '.join(str(error).split())}; the inputs are {found or 'none'}"


def _refuse(cls: type[Function], what: str) -> NoReturn:
    raise ShapeError(f"{cls.__name__}: {what}")


def _place(module: Any) -> str:
    return "the host (numpy)" if module.__name__ == "numpy" else f"the device ({module.__name__})"


def _as_output(cls: type[Function], value: Any, wanted: Any, xp: Any) -> Tensor:
    if _modules.get(type(value)) is None and _module_of(value) is None:
        value = xp.asarray(value)                 # NumPy's reductions to a scalar are no arrays
    dtype = value.dtype
    if dtype is not wanted and wanted is not None and dtype != wanted and (dtype.kind == "f" or cls.result_dtype is not None):
        raise ShapeError(f"{cls.__name__}: the result is {dtype}, expected {wanted}; a promotion crept in")
    return Tensor(value)


def _record(ctx: Context, arrays: list[Any], inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """Makes `ctx`, which has its edges, a node of the graph that computed `outputs` from `inputs`, whose arrays are `arrays`."""
    ctx.sequence = next(_sequence)
    ctx.wanted = ctx.needs
    ctx.landed = ctx.out_requests = None
    ctx.passed = False
    output_meta: list[Any] = []
    ctx.output_meta, ctx.grads = output_meta, [None] * len(outputs)
    for tensor in outputs:
        array = tensor.array
        dtype = array.dtype
        if dtype.kind == "f":
            tensor.requires_grad = True
            tensor.edge = (ctx, len(output_meta))
        output_meta.append((array.shape, dtype))
        arrays.append(array)
    if ctx._saved:
        ctx.watch(arrays, inputs + outputs)
