"""Reverse mode: walks the graph from a result back to its leaves.

Four promises, each with a test:
1. no recursion: a graph of any depth;
2. the order depends on the program only (the sequence in which ops ran), so every rank does the same;
3. a leaf's hooks run once per backward, at the moment its last contribution has landed, also for a parameter used many
   times and inside recomputed blocks: communication can start while the rest of backward still runs;
4. what a node saved is released as the node is passed.

Backward can run as two calls (zero-bubble pipelines): `run_backward(..., split=True)` computes the gradients of
activations and hands back a `Deferred`, whose `run()` computes those of the parameters later.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Callable
from sys import getrefcount
from typing import Any

import numpy as np

from mpitrain.autograd.accumulate import ONE, accumulate, add_to_leaf, fit, is_private
from mpitrain.autograd.context import Context
from mpitrain.autograd.half import gradient_dtype
from mpitrain.autograd.mode import mode
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, is_array
from mpitrain.errors import GraphError, ShapeError


def run_backward(root: Tensor, grad: Any = None, *, progress: Callable[[], None] | None = None,
                 split: bool = False) -> Deferred | None:
    """Adds the gradient of `root` to `grad` of every leaf below it; `progress` is called between nodes.

    `grad` is the gradient of the final result with respect to `root`, 1 by default for a scalar.
    """
    if not root.requires_grad:
        raise GraphError("backward from a tensor that does not require a gradient: nothing it was computed from does")
    walk = Backward(progress, split)
    walk.run([(root, _root_gradient(root, grad))])
    return Deferred(walk) if split else None


def _root_gradient(root: Tensor, grad: Any) -> Array:
    if grad is None:
        if root.size != 1:
            raise ShapeError(f"backward from a tensor of shape {root.shape} needs the gradient of that shape")
        grad = 1
    if isinstance(grad, Tensor):
        grad = grad.array
    if not is_array(grad):
        grad = root.xp.full(root.shape, grad, dtype=root.dtype)
    if grad.shape != root.shape or grad.dtype != root.dtype:
        raise ShapeError(f"backward: the gradient is {grad.shape} {grad.dtype}, the tensor {root.shape} {root.dtype}")
    return grad


class Deferred:
    """The second call of a split backward: the gradients of the parameters."""

    def __init__(self, walk: Backward):
        self._walk: Backward | None = walk

    @property
    def nodes(self) -> list[tuple[Context, list[Array]]]:
        """The operations with parameters, each with the gradients of its outputs, which may be replaced before `run`."""
        return [] if self._walk is None else self._walk.deferred

    def run(self) -> None:
        if self._walk is None:
            raise GraphError("the second half of a split backward ran twice")
        walk, self._walk = self._walk, None
        walk.run_deferred()


class Backward:
    """One pass. `pending` counts, per leaf, the contributions still to land; a hook may fire at zero.

    Inside a recomputed block another pass runs with this one as its `parent`: a leaf that the inner pass has finished
    is one contribution landed here.
    """

    def __init__(self, progress: Callable[[], None] | None, split: bool,
                 parent: Backward | None = None, parent_node: Context | None = None):
        self.progress, self.split, self.parent, self.parent_node = progress, split, parent, parent_node
        self.pending: dict[int, int] = {}
        self.touched: dict[int, Tensor] = {}          # leaves that got a contribution in this pass
        self.private: set[int] = set()                # leaves that no other pass knows: a recomputed block's inputs
        self.handed_out: dict[int, Array] = {}        # memory that `Context.out` made, not yet landed
        self.added: set[int] = set()                  # leaves whose `Context.so_far` an op has, which it will return
        self.deferred: list[tuple[Context, list[Array]]] = []
        self.watchers: list[tuple[int, int, Callable[[], None]]] = []    # heap of (-sequence, order, callback)

    def run(self, roots: list[tuple[Tensor, Array]]) -> None:
        order = self._order([root.node for root, _ in roots if root.node is not None])
        for root, _ in roots:
            if root.edge is None:
                self.pending[id(root)] = self.pending.get(id(root), 0) + 1
        try:
            for root, grad in roots:
                if root.edge is not None:
                    accumulate(root.node, root.edge[1], grad)
                else:
                    self.land(root, grad)
            with _Running(self):
                for node in order:
                    if self.watchers:
                        self._call_watchers(node.sequence)
                    self._visit(node)
                    if self.progress is not None:
                        self.progress()
                self._call_watchers(0)
        except BaseException:                         # an interrupted one too: the next backward would add what is left
            for node in order:
                node.grads = [None] * len(node.grads)
            raise

    def run_deferred(self) -> None:
        with _Running(self):
            for node, grads in self.deferred:
                self._step(node, grads, parameters=True, others=False)
                node.release()
                if self.progress is not None:
                    self.progress()
        self.deferred.clear()

    def after(self, sequence: int, callback: Callable[[], None]) -> None:
        """Calls `callback` when every node recorded after `sequence` has been passed (end of a module's backward)."""
        heapq.heappush(self.watchers, (-sequence, next(_order), callback))

    def _call_watchers(self, sequence: int) -> None:
        while self.watchers and -self.watchers[0][0] >= sequence:
            heapq.heappop(self.watchers)[2]()

    def _order(self, nodes: list[Context]) -> list[Context]:
        """All nodes below, latest first: inputs are always older than what was computed from them."""
        found = {id(node): node for node in nodes}
        stack = list(found.values())
        pending = self.pending
        while stack:
            for edge in stack.pop().edges:
                if edge is None:
                    continue
                if type(edge) is not tuple:
                    pending[id(edge)] = pending.get(id(edge), 0) + 1
                elif id(node := edge[0]) not in found:
                    found[id(node)] = node
                    stack.append(node)
        return sorted(found.values(), key=_sequence, reverse=True)

    def _visit(self, node: Context) -> None:
        grads = node.grads
        node.grads = [None] * len(grads)
        missing = 0
        for grad in grads:
            missing += grad is None
        if missing == len(grads):                     # nothing flows here: its leaves get no contribution from it
            node.passed = True
            for edge in node.edges:
                if isinstance(edge, Tensor):
                    self.land(edge, None)
            node.release()
            return
        if node.passed:
            node.refuse()
        node.passed = True
        whole: list[Array] = [grad if grad is not None else node.xp.zeros(*meta)
                              for grad, meta in zip(grads, node.output_meta)] if missing else grads
        if self.split and any(isinstance(edge, Tensor) and edge.is_parameter for edge in node.edges):
            self.deferred.append((node, whole))
            self._step(node, whole, parameters=False, others=True)
        else:
            self._step(node, whole, parameters=True, others=True)
            node.release()

    def _step(self, node: Context, grads: list[Array], *, parameters: bool, others: bool) -> None:
        """One call of the op's backward, for the inputs of the kind asked for."""
        edges = node.edges
        if parameters and others:
            needs = node.wanted
        else:
            needs = tuple(edge is not None and (parameters if isinstance(edge, Tensor) and edge.is_parameter else others)
                          for edge in edges)
            if not any(needs):
                return
        node.needs, node.out_requests = needs, self._out
        result = node.function.backward(node, *grads)
        result = list(result) if isinstance(result, tuple) else [result]    # a list, from which each one can be taken away
        if len(result) != len(edges):
            raise GraphError(f"{node.function.__name__}: backward returned {len(result)} gradients for {len(edges)} inputs")
        for i, edge in enumerate(edges):
            if not needs[i] or (node.landed and id(edge) in node.landed):
                continue
            contribution, result[i] = result[i], None
            if contribution is not None:
                shape, dtype = edge[0].output_meta[edge[1]] if type(edge) is tuple else node.leaf_meta[i]
                if type(contribution) is not np.ndarray or contribution.shape != shape or contribution.dtype is not dtype:
                    contribution = fit(node, i, contribution, shape, dtype)
            if type(edge) is not tuple:
                ours = edge.grad is None and edge.grad_buffer is None and (
                    getrefcount(contribution) == ONE and is_private(contribution))
                self.land(edge, contribution, ours)
            elif contribution is not None:
                if edge[0].grads[edge[1]] is None:
                    edge[0].grads[edge[1]] = contribution
                else:
                    accumulate(edge[0], edge[1], contribution)

    def land(self, leaf: Tensor, contribution: Array | None, ours: bool = False) -> None:
        """Adds one contribution to a leaf's gradient; the last one makes it final. `ours`: nobody else has it."""
        if contribution is not None:
            if leaf.grad is None and contribution is leaf.grad_buffer:
                leaf.grad = contribution              # the op wrote it there
            elif self.added and contribution is leaf.grad and id(leaf) in self.added:
                self.added.remove(id(leaf))           # the op added it there
            else:
                handed_out = self.handed_out and self.handed_out.pop(id(contribution), None) is not None
                add_to_leaf(leaf, contribution, ours or bool(handed_out))
            self.touched[id(leaf)] = leaf
        self.arrive(leaf)

    def arrive(self, leaf: Tensor) -> None:
        key = id(leaf)
        self.pending[key] = left = self.pending[key] - 1
        if left == 0 and key in self.touched:
            node = self.parent_node
            if self.parent is not None and node is not None and key not in self.private and (
                    leaf.is_parameter or any(edge is leaf for edge in node.edges)):     # others the block made itself
                self.parent.inner_final(node, leaf)
            elif mode.held is not None:
                mode.held.append(leaf)
            else:
                for hook in leaf.grad_hooks:
                    hook(leaf)

    def inner_final(self, node: Context, leaf: Tensor) -> None:
        """The recomputed block of `node` has finished with `leaf`: one contribution landed, ahead of the node's end."""
        if not any(edge is leaf for edge in node.edges):
            raise GraphError("recomputing a block used a parameter that its first run did not: it must do the same twice")
        if node.landed is None:
            node.landed = set()
        node.landed.add(id(leaf))
        self.touched[id(leaf)] = leaf
        self.arrive(leaf)

    def _out(self, node: Context, i: int, so_far: bool = False) -> Array | None:
        leaf = node.edges[i]
        if not isinstance(leaf, Tensor) or (leaf.grad is None) == so_far or not node.needs[i]:
            return None
        for place, edge in enumerate(node.edges):
            if edge is leaf and place != i:
                return None
        if so_far:
            self.added.add(id(leaf))
            return leaf.grad
        if leaf.grad_buffer is None:              # new memory, known to be nobody else's: no copy on landing
            shape, dtype = node.leaf_meta[i]
            fresh = node.xp.empty(shape, gradient_dtype(leaf, dtype))
            self.handed_out[id(fresh)] = fresh
            return fresh
        return leaf.grad_buffer if node.leaf_meta[i][0] == leaf.grad_buffer.shape else None


class _Running:
    """Nothing that a backward computes is recorded, and `current_walk` finds this pass. A generator would take longer."""

    def __init__(self, walk: Backward):
        self._walk = walk

    def __enter__(self) -> None:
        self._before, mode.recording = mode.recording, False
        mode.walks.append(self._walk)

    def __exit__(self, *_: object) -> None:
        mode.walks.pop()
        mode.recording = self._before


_order = itertools.count()
_sequence = operator.attrgetter("sequence")


def current_walk() -> Backward:
    """The pass whose node is running now; for ops that need the engine itself (recomputation, module hooks)."""
    walk = mode.walks[-1]
    if not isinstance(walk, Backward):
        raise GraphError(f"{walk}: only Tensor.backward comes through here, since what this op does for a module (it gathers "
                         "parameters or runs hooks) is done once for each backward; take grad of what is computed without it")
    return walk
