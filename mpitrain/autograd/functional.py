"""Products with Jacobians and Hessians of a function, and the matrices themselves: `grad` of its results, under PyTorch's names.

Each takes a function of tensors and its inputs, one tensor or a tuple of them; what it gives for the inputs has the same form.
The inputs themselves are left alone: the function gets tensors of its own at their values, or, with `create_graph`, ones that
the results can be differentiated through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpitrain.autograd.context import Context
from mpitrain.autograd.derivatives import Same, grad
from mpitrain.autograd.function import Function
from mpitrain.autograd.mode import enable_grad, keep_inputs, no_grad
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, is_array
from mpitrain.errors import GraphError, ShapeError

Derived = Callable[..., Any]


def vjp(func: Derived, inputs: Any, v: Any = None, create_graph: bool = False) -> tuple[Any, Any]:
    """(func(inputs), v times the Jacobian): v has the shapes of the outputs; None is 1 for an output with one value."""
    given, outputs, several = _run(func, inputs, create_graph)
    starts = [None] * len(outputs) if v is None else _like("vjp", "v", v, outputs)
    found = _grads(outputs, given, starts, create_graph)
    return _form(_results(outputs, create_graph), several), _form(found, _is_several(inputs))


def jvp(func: Derived, inputs: Any, v: Any = None, create_graph: bool = False) -> tuple[Any, Any]:
    """(func(inputs), the Jacobian times v): v has the shapes of the inputs; None is 1 for an input with one value.

    Reverse mode twice: v' J is linear in v', and its derivative by v' in the direction v is J v.
    """
    given, outputs, several = _run(func, inputs, create_graph)
    along = _like("jvp", "v", _ones("jvp", v, given), given)
    with enable_grad():
        probes = [Tensor(y.xp.zeros(y.shape, y.dtype), requires_grad=True) for y in outputs]
        products = _grads(outputs, given, probes, True)
    found = _grads(products, probes, along, create_graph)
    return _form(_results(outputs, create_graph), several), _form(found, several)


def hvp(func: Derived, inputs: Any, v: Any = None, create_graph: bool = False) -> tuple[Any, Any]:
    """(func(inputs), one value; its Hessian times v): v has the shapes of the inputs."""
    given, outputs, _ = _run(func, inputs, create_graph)
    _one_value("hvp", outputs)
    along = _like("hvp", "v", _ones("hvp", v, given), given)
    first = _grads(outputs, given, [None], True)
    found = _grads(first, given, along, create_graph)
    return _results(outputs, create_graph)[0], _form(found, _is_several(inputs))


def jacobian(func: Derived, inputs: Any, create_graph: bool = False) -> Any:
    """The derivative of each number of the output by each of the input: (*output's shape, *input's shape).

    For several inputs a tuple of those, and for several outputs a tuple of that. One backward pass for each number of the output.
    """
    given, outputs, several = _run(func, inputs, create_graph)
    found = [_form(_rows(y, given, create_graph), _is_several(inputs)) for y in outputs]
    return _form(found, several)


def hessian(func: Derived, inputs: Any, create_graph: bool = False) -> Any:
    """The second derivatives of one value, (*input's shape, *input's shape); for several inputs a tuple of tuples."""
    def slope(*given: Tensor) -> Any:
        outputs = _listed(func(*given))
        _one_value("hessian", outputs)
        return _form(_grads(outputs, given, [None], True), _is_several(inputs))
    return jacobian(slope, inputs, create_graph)


def _run(func: Derived, inputs: Any, create_graph: bool) -> tuple[list[Tensor], list[Tensor], bool]:
    """The inputs that `func` gets, its outputs, and whether it gave a tuple of them."""
    given = []
    with enable_grad(), keep_inputs():
        for x in _listed(inputs):
            if not isinstance(x, Tensor):
                raise GraphError(f"an input is {type(x).__name__}: the inputs of a derivative are tensors")
            given.append(Same.apply(x) if create_graph and x.requires_grad else Tensor(x.array, requires_grad=True))
        result = func(*given)
    outputs = _listed(result)
    if not all(isinstance(y, Tensor) for y in outputs):
        raise GraphError(f"{getattr(func, '__name__', 'the function')} gave {type(result).__name__}, expected a tensor or "
                         "a tuple of them")
    return given, outputs, _is_several(result)


def _results(outputs: Sequence[Tensor], create_graph: bool) -> list[Tensor]:
    return [y if create_graph else y.detach() for y in outputs]


def _grads(outputs: Sequence[Tensor], inputs: Sequence[Tensor], starts: Sequence[Any], create_graph: bool,
           retain: bool = False) -> list[Tensor]:
    """`grad`, with zeros where nothing flows."""
    pairs = [(y, start) for y, start in zip(outputs, starts) if y.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(inputs)
    if pairs:
        found = grad([y for y, _ in pairs], inputs, [start for _, start in pairs], create_graph, True, create_graph or retain)
    return [Tensor(x.xp.zeros(x.shape, x.dtype)) if g is None else g for g, x in zip(found, inputs)]


class Rows(Function):
    """Tensors of one shape along a new first dim."""

    @staticmethod
    def forward(ctx: Context, *arrays: Array) -> Array:
        return ctx.xp.stack(arrays)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple([grad[i] for i in range(len(ctx.edges))])


def _rows(output: Tensor, inputs: list[Tensor], create_graph: bool) -> list[Tensor]:
    xp, rows = output.xp, []
    for place in range(output.size):
        one = xp.zeros(output.size, output.dtype)
        one[place] = 1
        rows.append(_grads([output], inputs, [one.reshape(output.shape)], create_graph, retain=True))
    with enable_grad() if create_graph else no_grad():
        return [Rows.apply(*[row[i] for row in rows]).reshape(*output.shape, *x.shape) if rows else
                Tensor(xp.zeros((*output.shape, *x.shape), x.dtype)) for i, x in enumerate(inputs)]


def _ones(name: str, v: Any, inputs: list[Tensor]) -> Any:
    if v is None and any(x.size != 1 for x in inputs):
        raise ShapeError(f"{name}: give v, of the shapes of the inputs: {', '.join(str(x.shape) for x in inputs)}")
    return [x.xp.ones(x.shape, x.dtype) for x in inputs] if v is None else v


def _like(name: str, what: str, given: Any, tensors: Sequence[Tensor]) -> list[Array | Tensor]:
    found = _listed(given)
    shapes = [tuple(getattr(g, "shape", ())) for g in found]
    if shapes != [x.shape for x in tensors] or not all(isinstance(g, Tensor) or is_array(g) for g in found):
        raise ShapeError(f"{name}: {what} has the shapes {shapes}, expected {[x.shape for x in tensors]}")
    return found


def _one_value(name: str, outputs: Sequence[Any]) -> None:
    if len(outputs) != 1 or getattr(outputs[0], "size", 0) != 1:
        raise ShapeError(f"{name}: the function gave {[tuple(getattr(y, 'shape', ())) for y in outputs]}, expected one value; "
                         "add up what it computes")


def _listed(given: Any) -> list[Any]:
    return list(given) if _is_several(given) else [given]


def _is_several(given: Any) -> bool:
    return isinstance(given, (list, tuple))


def _form(found: Sequence[Any], several: bool) -> Any:
    return tuple(found) if several else found[0]
