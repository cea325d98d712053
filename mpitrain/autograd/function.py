"""Function: what the author of an operation writes.

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

        @staticmethod
        def derivative(ctx, grad):                          # the same on tensors, for derivatives of derivatives
            x, y = ctx.input(0), ctx.input(1)
            return (grad * y if ctx.needs[0] else None,
                    grad * x if ctx.needs[1] else None)

Where speed does not matter, `backward` is left out: it is `derivative`, not recorded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from numbers import Number
from typing import Any, ClassVar, NoReturn

import numpy as np

from mpitrain.autograd.context import Context
from mpitrain.autograd.half import apply_around, mixed, result_beside, takes_as_they_are
from mpitrain.autograd.mode import mode, no_grad, replacing
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import array_module, is_array, is_half
from mpitrain.backend.dtype import HALF_CHARS
from mpitrain.errors import GraphError, ShapeError

_sequence = itertools.count(1)                    # program order: the only thing the order of backward depends on


class Function:
    """One differentiable operation: arrays in, one array (or a tuple of arrays) out; metadata by keyword.

    `broadcasts`: the gradients are summed back to the shapes of the inputs. `views`: the output shows the input's memory.
    `result_dtype`: set where the result is meant to have another dtype than the floating-point inputs. `floats`: how many of the
    first inputs must be float32 or float64, since compiled code reads them; the others may be labels, indices or masks.
    `integers`: the kinds that may stand there all the same, "iu" (and "b": booleans), since forward minds them or `makes_floats`.
    `is_arithmetic`: of integers and a number with fractions float32 comes, too, and of integers alone integers.
    `makes_floats`: integers and booleans become float32 first, PyTorch's default (NumPy would make float16 of bytes).
    `complex_inputs`: "" (the default): they are refused. "analytic": each output is an analytic function of each input, and
    backward multiplies with its derivative (see `analytic.py`, which conjugates around it). "own": backward follows PyTorch's
    convention by itself, the gradient being dL/dRe + i dL/dIm.
    `recorded`: False for what is no operation of a program but only stands around some (see `autograd.record`).
    `half`: what becomes of 16-bit inputs, which are on devices alone; see `autograd.half`.
    """

    broadcasts = False
    views = False
    result_dtype: Any = None
    floats = 0
    integers = ""
    makes_floats = is_arithmetic = False
    complex_inputs = ""
    recorded = True
    half = ""
    conjugating: ClassVar[Callable[[Any], Any]]   # `analytic.conjugating` and
    cast: ClassVar[Callable[..., Any]]            # `cast.Cast.apply`, attached by the package: their files import this one

    @staticmethod
    def forward(ctx: Context, *arrays: Any, **params: Any) -> Any:
        raise GraphError("a Function defines forward")

    @staticmethod
    def backward(ctx: Context, *grads: Any) -> Any:
        """Gradients of the inputs, None where `ctx.needs` is False; one argument per output. By default `derivative`.

        May be called twice for one node, with different `ctx.needs`: activations first, parameters later.
        """
        if ctx.function.derivative is Function.derivative:
            raise GraphError(f"{ctx.function.__name__}: a Function defines backward or derivative")
        with no_grad():
            result = ctx.function.derivative(ctx, *[Tensor(grad) for grad in grads])
        return tuple([_raw(x) for x in result]) if isinstance(result, tuple) else _raw(result)

    @staticmethod
    def derivative(ctx: Context, *grads: Any) -> Any:
        """`backward` written with operations on tensors (`grads` too), so that it has derivatives itself; see `ctx.input`."""
        raise GraphError(f"{ctx.function.__name__}: it has a first derivative only, and grad with create_graph or retain_graph "
                         "wants more; compute with other operations there, or write `derivative` of your own Function")

    @classmethod
    def apply(cls, *inputs: Any, **params: Any) -> Any:
        """Runs the operation, and records it where an input requires a gradient.

        Inputs are tensors, arrays, numbers, or lists of numbers, which become float32. Raises ShapeError where arrays live on
        different devices, mix float dtypes (a silent promotion to float64 would halve the speed of everything after it), or are
        no floats where some are wanted.
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
                x = of_list(x) if isinstance(x, list | tuple) else x
                module = _module_of(x)
            if module is not None:
                if module is not xp:
                    xp = module if xp is None else _refuse(cls, (
                        f"one input is on {_place(xp)}, another on {_place(module)}; move them to one device first"))
                kind = x.dtype            # below: a comparison takes None for float64, NumPy's default
                if kind is not dtype and (dtype is None or kind != dtype):
                    if len(arrays) < cls.floats and (kind.char not in "fd" or not kind.isnative) and (
                            kind.kind not in cls.integers) and (module is np or kind.char not in HALF_CHARS):
                        _refuse(cls, f"an input is {kind}, expected float32 or float64; convert it first")
                    if kind.char in "fd":
                        dtype = kind if dtype is None else mixed(cls, dtype, kind)
                    elif kind.char in "eEgG":
                        if module is np or kind.char in "gG":
                            _refuse(cls, f"an input is {kind}, expected float32 or float64; convert it first")
                        if not takes_as_they_are(cls, kind, inputs):
                            return apply_around(cls, kind, inputs, params)
                        dtype = kind
                    elif kind.kind == "c":
                        if not cls.complex_inputs:
                            _refuse(cls, f"an input is {kind}, expected real numbers; compute with its .real and .imag")
                    elif cls.makes_floats and kind.kind in "iub":
                        x = x.astype("float32")
            arrays.append(x)
            edges.append(edge)
            leaf_meta.append(meta)
            needs.append(edge is not None)
        recording = True in needs and mode.recording
        ctx = Context(cls, xp if xp is not None else array_module(), tuple(needs) if recording else (False,) * len(needs))
        try:
            forward = _replaced(cls) if replacing else cls.forward
            result = forward(ctx, *arrays, **params)
        except _OF_ARRAYS as error:
            if not cls.__module__.startswith("mpitrain."):
                raise                             # whoever wrote the operation wants to see where
            raise ShapeError(_explained(cls, arrays, error)) from error
        if dtype is None and (cls.is_arithmetic or xp is None) and type(result) is not tuple:
            result = _of_numbers(ctx.xp.asarray(result), xp is not None, inputs)
        wanted = cls.result_dtype if cls.result_dtype is not None else dtype
        several = False
        outputs: tuple[Tensor, ...]
        if type(result) is np.ndarray and result.dtype is wanted:
            outputs = (Tensor(result),)           # by far the most frequent, without a call
        elif several := type(result) is tuple:
            outputs = tuple([_as_output(ctx, x, wanted) for x in result])
        else:
            outputs = (_as_output(ctx, result, wanted),)
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


def _replaced(cls: type[Function]) -> Callable[..., Any]:
    return cls.forward if mode.forward_of is None else mode.forward_of(cls)


WIDE = {np.dtype("float64"): "float32", np.dtype("complex128"): "complex64"}    # and what Python's numbers are instead


def _of_numbers(result: Any, beside_arrays: bool, inputs: tuple[Any, ...]) -> Any:
    """In single precision: what comes of plain numbers, or of integers beside one with fractions, as in PyTorch."""
    if result.dtype == "float64" and (beside_arrays or not any(hasattr(x, "dtype") for x in inputs)):
        return result.astype("float32")
    if result.dtype == "complex128" and not any(getattr(x, "dtype", None) in WIDE for x in inputs):
        return result.astype("complex64")
    return result


_modules: dict[type, Any] = {}                    # array module of each type met so far, None for what is no array


def _module_of(value: Any) -> Any:
    found = array_module(value) if is_array(value) else None
    if not isinstance(value, list | tuple):       # these are looked at each time
        _modules[type(value)] = found
    return found


def of_list(values: Any) -> Any:
    """What Tensor makes of lists of numbers: float32. ShapeError where that would cut tensors off from their gradients, and where
    a kind of list of somebody's own means something else."""
    kind = type(values)
    if kind is not list and kind is not tuple:
        how = "give its .data" if hasattr(values, "batch_sizes") else "give one of its parts"
        raise ShapeError(f"an input is a {kind.__module__}.{kind.__name__}, expected a Tensor, an array or a number; {how}")

    def has_gradient(value: Any) -> bool:
        return value.requires_grad if isinstance(value, Tensor) else isinstance(value, list | tuple) and any(
            map(has_gradient, value))
    if mode.recording and has_gradient(values):
        raise ShapeError("an input is a list of tensors that require gradients, expected one tensor; ops.stack joins them")
    return Tensor(values).array


_OF_ARRAYS = (TypeError, ValueError, IndexError, AttributeError, ArithmeticError)     # what NumPy says where arrays do not fit


def _explained(cls: type[Function], arrays: list[Any], error: Exception) -> str:
    """What an array library said, in one line, with the operation and its inputs."""
    for place, x in enumerate(arrays) if isinstance(error, (AttributeError, TypeError)) else ():
        if not (x is None or isinstance(x, (Number, np.generic)) or _module_of(x) is not None):
            return f"{cls.__name__}: input {place} is a {type(x).__module__}.{type(x).__name__}, expected a Tensor, an array " \
                   "or a number; make a Tensor of it first: Tensor(x)"
    found = ", ".join(f"{x.dtype} {x.shape}" if _module_of(x) is not None else repr(x)[:40] for x in arrays)
    return f"{cls.__name__}: {' '.join(str(error).split())}; the inputs are {found or 'none'}"


def _refuse(cls: type[Function], what: str) -> NoReturn:
    raise ShapeError(f"{cls.__name__}: {what}")


def _place(module: Any) -> str:
    return "the host (numpy)" if module.__name__ == "numpy" else f"the device ({module.__name__})"


def _as_output(ctx: Context, value: Any, wanted: Any) -> Tensor:
    if _modules.get(type(value)) is None and _module_of(value) is None:
        scalar, value = value, ctx.xp.asarray(value)      # NumPy's reductions to a scalar are no arrays
        ctx._saved = [value if kept is scalar else kept for kept in ctx._saved or ()]
    dtype = value.dtype
    if wanted is None:
        if dtype.char in "eg":                    # of NumPy's scalars, which count as numbers, not as arrays
            raise ShapeError(f"{ctx.function.__name__}: the result is {dtype}, expected float32 or float64; convert the inputs "
                             "first")
    elif dtype is not wanted and dtype != wanted and (dtype.kind == "f" or ctx.function.result_dtype is not None):
        if not (is_half(wanted) or is_half(dtype)) or ctx.xp is np:
            raise ShapeError(f"{ctx.function.__name__}: the result is {dtype}, expected {wanted}; a promotion crept in")
        value = result_beside(ctx, value, wanted)
    return Tensor(value)


def _raw(value: Any) -> Any:
    return value.array if isinstance(value, Tensor) else value


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
        if dtype.kind == "f" or dtype.kind == "c" or dtype.char == "E":
            tensor.requires_grad = True
            tensor.edge = (ctx, len(output_meta))
            if dtype.kind == "c" and ctx.function.complex_inputs == "analytic":
                ctx.function = Function.conjugating(ctx.function)
        output_meta.append((array.shape, dtype))
        arrays.append(array)
    if ctx._saved:
        ctx.watch(arrays, inputs + outputs)
    if mode.keeps_inputs:
        ctx.beside = Context(ctx.function, ctx.xp, ctx.needs)
        ctx.beside.edges = ctx.edges
        ctx.beside.save(*arrays[:len(inputs)])
        ctx.beside.watch(arrays, inputs + outputs)
