"""Gradient checkpointing: keep a block's inputs instead of its activations, and run it again during backward.

Chen, Xu, Zhang, Guestrin: "Training deep nets with sublinear memory cost", 2016. The block must compute the same twice;
random numbers here are functions of what they are for, so dropout repeats its mask by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain.autograd.context import Context
from mpitrain.autograd.derivatives import differentiate
from mpitrain.autograd.engine import Backward, current_walk
from mpitrain.autograd.function import Function
from mpitrain.autograd.mode import enable_grad, mode, no_grad
from mpitrain.autograd.tensor import Tensor, Version
from mpitrain.backend import is_array, random
from mpitrain.errors import GraphError


def recompute(block: Callable[..., Any], *inputs: Any) -> Any:
    """``block(*inputs)``, whose activations are computed again in backward instead of being kept.

    `block` returns a tensor or a tuple of tensors. Parameters that it uses get their gradients, and their hooks run at
    the moment the last contribution lands, as if the block had been recorded.
    """
    if not mode.recording:
        return block(*inputs)
    is_given = [isinstance(x, Tensor) and x.is_parameter for x in inputs]
    given = [x for x, fixed in zip(inputs, is_given) if not fixed]

    def run(*values: Any) -> Any:                 # parameters handed in are used in place, like those the block owns
        rest = iter(values)
        return block(*(x if fixed else next(rest) for x, fixed in zip(inputs, is_given)))

    scope = random.current().copy()
    leaves: dict[int, Tensor] = {}
    outer = mode.recorder

    def note(function: type[Any], arguments: tuple[Any, ...], params: dict[str, Any], results: tuple[Tensor, ...]) -> None:
        """Keeps the leaves among the arguments, also what shows a parameter's memory without a gradient."""
        for x in arguments:
            if isinstance(x, Tensor) and x.node is None and (
                    x.requires_grad or (x.version is not None and x.version.is_parameter)):
                leaves.setdefault(id(x), x)
        if outer is not None:
            outer(function, arguments, params, results)

    mode.recorder = note
    try:
        with no_grad():
            result = run(*given)
    finally:
        mode.recorder = outer
    outputs = result if isinstance(result, tuple) else (result,)
    own = {id(x) for x in given if isinstance(x, Tensor)}
    used = [leaf for leaf in leaves.values() if leaf.requires_grad and id(leaf) not in own]
    versions = {version: version.count for leaf in leaves.values() if (version := leaf.shared_version()).is_parameter}
    recorded = Recompute.apply(*given, *used, repeat=_Repeat(run, len(given), [t.array for t in outputs], scope, versions))
    return recorded if isinstance(result, tuple) else recorded[0]


class _Repeat:
    """A block that runs again: its number of inputs, its first results, its random scope, the versions of its parameters."""

    def __init__(self, block: Callable[..., Any], n_inputs: int, results: list[Any], scope: random.Scope,
                 versions: dict[Version, int]):
        self.block, self.n_inputs, self.results, self.scope, self.versions = block, n_inputs, results, scope, versions

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        for version, count in self.versions.items():
            version.require(count, "Recompute: a parameter that the block reads again in backward")
        before, mode.recomputing = mode.recomputing, True
        try:
            with enable_grad(), random.use(self.scope.copy()):
                result = self.block(*inputs)
        finally:
            mode.recomputing = before
        return result if isinstance(result, tuple) else (result,)


class Recompute(Function):
    """A block as one node. Its edges are the block's inputs and then every leaf the block used.

    The inner pass lands the leaves' contributions one by one, so backward here returns none for them.
    """

    half = "any"
    recorded = False                              # the block's own operations are

    @staticmethod
    def forward(ctx: Context, *arrays: Any, repeat: _Repeat) -> tuple[Any, ...]:
        ctx.save(*arrays[:repeat.n_inputs])
        ctx.repeat = repeat
        results, repeat.results = repeat.results, []
        return tuple(results)

    @staticmethod
    def backward(ctx: Context, *grads: Any) -> tuple[Any, ...]:
        inner: Backward | None = getattr(ctx, "inner", None)
        if inner is not None:                     # the second call of a split backward: parameters only
            inner.run_deferred()
            return (None,) * len(ctx.edges)
        if not isinstance(mode.walks[-1], Backward):  # `grad`, which lands nothing in leaves
            return tuple(Function.backward(ctx, *grads))
        walk = current_walk()
        copies = [Tensor(x, requires_grad=needed) if is_array(x) else x for x, needed in zip(ctx.saved, ctx.needs)]
        outputs = ctx.repeat(copies)
        if [(t.shape, t.dtype) for t in outputs] != [(tuple(shape), dtype) for shape, dtype in ctx.output_meta]:
            raise GraphError("recomputing a block gave results of other shapes than its first run")
        later = walk.split and not any(needed and isinstance(edge, Tensor) and edge.is_parameter
                                       for edge, needed in zip(ctx.edges, ctx.needs))     # else there is no second call
        inner = Backward(walk.progress, later, parent=walk, parent_node=ctx)
        inner.private = {id(x) for x in copies}
        inner.run([(t, g) for t, g in zip(outputs, grads) if t.requires_grad])
        if later:
            ctx.inner = inner
        passed = [x.grad if isinstance(x, Tensor) else None for x in copies]
        return (*passed, *(None for _ in ctx.edges[len(passed):]))

    @staticmethod
    def derivative(ctx: Context, *grads: Tensor) -> tuple[Any, ...]:
        """The block runs again, recorded, and is differentiated by its inputs and by the leaves it uses."""
        n = ctx.repeat.n_inputs
        return differentiate(lambda *inputs: ctx.repeat([*inputs]), [ctx.input(i) for i in range(n)], grads, ctx.needs[:n],
                             [leaf if needed else None for leaf, needed in zip(ctx.edges[n:], ctx.needs[n:])])
