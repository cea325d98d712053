"""Context: one use of an operation, a node of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mpitrain.autograd.tensor import Tensor, Version
from mpitrain.backend import Array, is_array
from mpitrain.errors import GraphError


class Context:
    """One use of a Function: what it saved for backward, and the edges to what it was computed from.

    An edge is a leaf tensor, or the (node, output) that made the input, or None where no gradient can flow. The input
    tensors themselves are not kept, so an activation that no op saved is freed at once.
    """

    __slots__ = ("__dict__", "_identities", "_saved", "_watched", "edges", "function", "grads", "landed", "leaf_meta", "needs",
                 "out_requests", "output_meta", "passed", "sequence", "wanted", "xp")

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

    def __init__(self, function: Any, xp: Any, needs: tuple[bool, ...]):
        self.function = function                      # an op may have attributes of its own
        self.xp, self.needs = xp, needs
        self._saved: Sequence[Any] | None = ()
        self._watched: Sequence[tuple[int, Version, int, bool, int]] = ()    # see `watch`
        self._identities: Sequence[int] = ()               # those of all input and output arrays, where any was saved

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
                    watched.append((place, version, version.count, tensor.is_parameter, at))
                    if tensor.is_parameter:
                        saved[place] = tensor
                    break
        self._saved, self._watched, self._identities = saved, watched, [*map(id, arrays)]

    @property
    def saved(self) -> list[Any]:
        """What forward saved. Raises GraphError where it has changed since, or was released."""
        if self._saved is None:
            self.refuse()
        saved = [*self._saved]
        for place, version, count, is_parameter, _ in self._watched:
            if version.count != count:
                version.require(count, f"{self.function.__name__}: an array it saved for backward")
            if is_parameter:
                saved[place] = saved[place].array
        return saved

    def input(self, i: int) -> Any:
        """What input i was, in `derivative`: a tensor with its place in the graph; numbers and None as they were given.

        GraphError where forward did not save that very array, and nobody entered `keep_inputs` around it.
        """
        edge = self.edges[i]
        if isinstance(edge, Tensor):
            self._kept(i, f"input {i}")           # changes in place are noticed
            return edge
        value, version = self._kept(i, f"input {i}")
        return tensor_at(edge, value, version) if is_array(value) else value

    def output(self, j: int = 0) -> Tensor:
        """What output j was, in `derivative`: a tensor with its place in the graph. GraphError where forward did not save it."""
        return tensor_at((self, j), *self._kept(len(self.edges) + j, f"output {j}"))

    def _kept(self, at: int, what: str) -> tuple[Any, Version | None]:
        """The array `at` of the inputs and outputs, and its version, where forward saved it."""
        saved = self.saved
        if self._identities:
            identity = self._identities[at]
            for place, version, _, _, first in self._watched:
                if self._identities[first] == identity:
                    return saved[place], version
            for place, kept in enumerate(self._saved or ()):
                if id(kept) == identity:
                    return saved[place], None
        beside: Context | None = self.__dict__.get("beside")
        if beside is not None and at < len(self.edges):
            return beside._kept(at, what)
        raise GraphError(f"{self.function.__name__}: higher derivatives need its {what}, which it did not save: run forward "
                         "under autograd.keep_inputs()")

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

    def so_far(self, i: int) -> Array | None:
        """In backward: the gradient of input i as earlier contributions have left it, where this one may be added in place; or
        None. Whoever takes it must add to it and return it: a product can, for nothing, on a device.
        """
        return self.out_requests(self, i, so_far=True) if self.out_requests is not None else None


def tensor_at(edge: Any, values: Array, version: Version | None = None) -> Tensor:
    """A tensor with these values at a place in the graph: (node, output), or None outside of it."""
    tensor = Tensor(values)
    tensor.version, tensor.edge, tensor.requires_grad = version, edge, edge is not None
    return tensor
