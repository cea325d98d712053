"""Derivatives as values: `grad`, whose results have a graph themselves where that is asked for.

`Tensor.backward` adds to the leaves' `grad`, once; this pass hands its results out and leaves the leaves alone. With
`create_graph` (or `retain_graph`) every op on the way is passed by its `derivative`, which keeps what the op saved; without,
by its `backward`, as `Tensor.backward` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from mpitrain.autograd.accumulate import fit
from mpitrain.autograd.context import Context, tensor_at
from mpitrain.autograd.function import Function
from mpitrain.autograd.mode import enable_grad, grad_enabled, mode, no_grad
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, is_array
from mpitrain.errors import GraphError, ShapeError

Tensors = Tensor | Sequence[Tensor]


def grad(outputs: Tensors, inputs: Tensors, grad_outputs: Any = None, create_graph: bool = False, allow_unused: bool = False,
         retain_graph: bool | None = None) -> tuple[Any, ...]:
    """The gradients of the sum of `outputs` with respect to each of `inputs`: one tensor for each; `torch.autograd.grad`.

    `inputs` are tensors that require a gradient, leaves or results. `grad_outputs` has the gradient of the final result with
    respect to each output, of its shape; None (also in its place) is 1 for an output with one value. With `create_graph` the
    results can be differentiated again. `retain_graph` (default: as `create_graph`) keeps the graph for another pass.

    Raises GraphError where an input was not used and not `allow_unused` (which gives None), and, by its name, where an op on
    the way has no higher derivatives.
    """
    roots, targets = _listed(outputs), _listed(inputs)
    for what, tensors in (("outputs", roots), ("inputs", targets)):
        for x in tensors:
            if not isinstance(x, Tensor) or not x.requires_grad:
                raise GraphError(f"grad: one of the {what} does not require a gradient: expected tensors that do, found "
                                 f"{x if isinstance(x, Tensor) else type(x).__name__}")
    given = [None] * len(roots) if grad_outputs is None else _listed(grad_outputs)
    if len(given) != len(roots):
        raise ShapeError(f"grad: {len(given)} grad_outputs for {len(roots)} outputs; give one for each")
    starts = [_start(root, g) for root, g in zip(roots, given)]
    retain = create_graph if retain_graph is None else retain_graph
    found = _gradients(roots, targets, starts, create_graph, retain)
    for place, (x, result) in enumerate(zip(targets, found)):
        if result is None and not allow_unused:
            raise GraphError(f"grad: input {place}, of shape {x.shape}, was not used for the outputs; allow_unused=True gives "
                             "None for it")
    return tuple(found)


def _gradients(roots: Sequence[Tensor], targets: Sequence[Tensor], starts: Sequence[Tensor], create_graph: bool, retain: bool,
               ends: Sequence[Tensor] = ()) -> list[Tensor | None]:
    walk = _Pass({_key(x) for x in targets}, create_graph or retain, {id(x.node) for x in ends})
    with enable_grad() if create_graph else no_grad():
        walk.run(roots, starts)
    return [walk.grads.get(_key(x)) for x in targets]


def differentiate(compute: Callable[..., Any], inputs: Sequence[Any], grads: Sequence[Tensor], needs: Sequence[bool],
                  leaves: Sequence[Tensor | None] = ()) -> tuple[Any, ...]:
    """A `derivative` for an op that `compute`, made of other ops, computes too: the gradients of `inputs`, where `needs` says so.

    `compute` runs again; with recording, the results have derivatives of every order. Gradients of `leaves`, which it uses by
    itself, come after those of the inputs.
    """
    recording = grad_enabled()
    with enable_grad():
        apart = [x if not isinstance(x, Tensor) else Same.apply(x) if recording and x.requires_grad else
                 Tensor(x.array, requires_grad=needed) for x, needed in zip(inputs, needs)]
        made = compute(*apart)
    pairs = [(y, g) for y, g in zip(made if isinstance(made, tuple) else (made,), grads) if y.requires_grad]
    wanted = [x for x, needed in zip(apart, needs) if needed]
    found = iter(_gradients([y for y, _ in pairs], [*wanted, *(x for x in leaves if x is not None)], [g for _, g in pairs],
                            recording, recording, [x for x in apart if isinstance(x, Tensor)]))
    return tuple([next(found) if needed else None for needed in (*needs, *(x is not None for x in leaves))])


def stand_in(ctx: Context, i: int, values: Array) -> Tensor:
    """`values` at the place of input i in the graph, in a `derivative` that is the same for both and has not kept the input."""
    edge = ctx.edges[i]
    return Same.apply(edge if isinstance(edge, Tensor) else tensor_at(edge, values), values)


class Same(Function):
    """The input, at a place of its own in the graph; with `values`, which have the same derivatives, instead of its own."""

    half = "any"
    complex_inputs = "analytic"
    views = True
    recorded = False

    @staticmethod
    def forward(ctx: Context, x: Array, values: Array | None = None) -> Array:
        return (x if values is None else values).view()

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return (grad, None)[:len(ctx.edges)]


class _Pass:
    """One pass from the outputs to the targets, latest op first: the order in which gradients are added is the program's."""

    def __init__(self, targets: set[Any], by_derivative: bool, ends: set[int]):
        self.targets, self.by_derivative, self.ends = targets, by_derivative, ends
        self.grads: dict[Any, Tensor] = {}            # by place: a leaf, or a node and the number of its output

    def run(self, roots: Sequence[Tensor], starts: Sequence[Tensor]) -> None:
        for root, start in zip(roots, starts):
            self._add(_key(root), start)
        for node in self._order([root.node for root in roots if root.node is not None]):
            self._visit(node)

    def _order(self, nodes: list[Context]) -> list[Context]:
        """The nodes through which a target is reached, latest first."""
        found = {id(node): node for node in nodes}
        stack = list(found.values())
        while stack:
            for edge in stack.pop().edges:
                if type(edge) is tuple and id(edge[0]) not in found and id(edge[0]) not in self.ends:
                    found[id(edge[0])] = edge[0]
                    stack.append(edge[0])
        self.leads: set[int] = set()
        for node in sorted(found.values(), key=_sequence):
            if any(self._reaches(edge) for edge in node.edges):
                self.leads.add(id(node))
        return sorted((node for node in found.values() if id(node) in self.leads), key=_sequence, reverse=True)

    def _reaches(self, edge: Any) -> bool:
        return edge is not None and (_key_of(edge) in self.targets or (type(edge) is tuple and id(edge[0]) in self.leads))

    def _visit(self, node: Context) -> None:
        places = [(id(node), j) for j in range(len(node.output_meta))]
        given = [self.grads.get(place) if place in self.targets else self.grads.pop(place, None) for place in places]
        if all(g is None for g in given):
            return
        if node.passed:
            node.refuse()
        node.needs, node.out_requests = tuple([self._reaches(edge) for edge in node.edges]), None
        whole = [Tensor(node.xp.zeros(*meta)) if g is None else g for g, meta in zip(given, node.output_meta)]
        mode.walks.append(node.function.__name__)
        try:
            if self.by_derivative:
                result = node.function.derivative(node, *whole)
            else:
                node.passed = True
                result = node.function.backward(node, *[g.array for g in whole])
        finally:
            mode.walks.pop()
        result = result if isinstance(result, tuple) else (result,)
        if len(result) != len(node.edges):
            raise GraphError(f"{node.function.__name__}: derivative returned {len(result)} gradients for "
                             f"{len(node.edges)} inputs")
        for i, (edge, contribution) in enumerate(zip(node.edges, result)):
            if node.needs[i] and contribution is not None:
                self._add(_key_of(edge), _fitted(node, i, edge, contribution))
        if not self.by_derivative:
            node.release()

    def _add(self, place: Any, contribution: Tensor) -> None:
        before = self.grads.get(place)
        self.grads[place] = contribution if before is None else before + contribution


def _fitted(node: Context, i: int, edge: Any, contribution: Any) -> Tensor:
    """The gradient of input i, in its shape: summed back where the op broadcasts."""
    shape, dtype = edge[0].output_meta[edge[1]] if type(edge) is tuple else node.leaf_meta[i]
    if not isinstance(contribution, Tensor):
        return Tensor(fit(node, i, contribution, shape, dtype))
    if node.function.broadcasts and contribution.shape != shape:
        extra = contribution.ndim - len(shape)
        dims = (*range(extra), *(extra + d for d, n in enumerate(shape) if n == 1 and contribution.shape[extra + d] != 1))
        contribution = contribution.sum(dims, True).reshape(shape)
    fit(node, i, contribution.array, shape, dtype)
    return contribution


def _start(root: Tensor, given: Any) -> Tensor:
    if given is None and root.size != 1:
        raise ShapeError(f"grad: an output of shape {root.shape} needs a grad_outputs of that shape; only one value has 1 for it")
    start = given if isinstance(given, Tensor) else Tensor(
        given if is_array(given) else root.xp.full(root.shape, 1 if given is None else given, dtype=root.dtype))
    if start.shape != root.shape or start.dtype != root.dtype:
        raise ShapeError(f"grad: the grad_outputs are {start.shape} {start.dtype}, the output {root.shape} {root.dtype}")
    return start


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _key(x: Tensor) -> Any:
    return id(x) if x.edge is None else _key_of(x.edge)


def _key_of(edge: Any) -> Any:
    return (id(edge[0]), edge[1]) if type(edge) is tuple else id(edge)


_sequence = attrgetter("sequence")
