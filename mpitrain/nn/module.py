"""Module: a part of a model, whose parameters and sub-modules are found among its attributes.

    class Two(Module):
        def __init__(self):
            self.first = Linear(784, 100)           # no super().__init__() needed, nothing is allocated yet
            self.second = Linear(100, 10)

        def forward(self, x):
            return self.second(relu(self.first(x)))

    model = Two()
    model.initialize(seed=0)                        # now it has memory and values

Names are paths in the order of assignment: "first.weight". A parameter that is used in two places has the first name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.autograd.mode import recorders
from mpitrain.autograd.record import within
from mpitrain.backend import CPU, Array, Device, float_dtype
from mpitrain.errors import GraphError
from mpitrain.nn.across import Across
from mpitrain.nn.arguments import Checked
from mpitrain.nn.by_name import ByName
from mpitrain.nn.hooks import Hook, Hooks
from mpitrain.nn.parameter import Buffer, Described, Parameter
from mpitrain.nn.storage import Allocate, FlatLayout, FlatStorage, check_state
from mpitrain.ops.inputs import FAILURES

__all__ = ["Module"]

Self = TypeVar("Self", bound="Module")
PLAIN = frozenset((bool, float, int, str, type(None)))     # of attributes that are no parts, and hold none
Places = np.ndarray[Any, Any]                    # whole numbers (L,)


class Module(Checked):
    """Subclasses define `forward`, and keep parameters, buffers and modules (or lists of modules) as attributes."""

    training = True
    path = ""                                     # the module's name in the model, known from `initialize` on
    plan: Mapping[str, str] = MappingProxyType({})    # the tensor-parallel placement of its layers: docs/tensor.md
    size_keys: Mapping[str, Sequence[str]] = MappingProxyType({})     # key of [model] -> layers whose outputs or heads it counts
    sized_with: Mapping[str, Any] = MappingProxyType({})              # further keys of [model], which those take for granted
    by_position = False                           # True where no position (dim 1) sees another: docs/context.md
    by_element = False                            # True where each number is treated by itself, and alike: docs/tensor.md
    by_channel = False                            # True where no channel (dim 1) sees another, and all are treated alike
    chains: Sequence[Sequence[str]] = ()          # layers inside, each of which takes only what the one before gives
    paths: Sequence[Sequence[str]] = ()           # all chains from input to output, number by number; (): the input itself
    channel_dims: tuple[int, int] | None = None   # dims of `weight` that are channels (dim 1) of outputs and of inputs
    spread: Callable[[int], Places] | None = None     # the positions that this rank has, where it has some of a sample's
    elastic: Any = None                           # the `choices.Elastic` of a supernet: its choices, and the path in use
    across: Across | None = None                  # the communication of a layer that several ranks compute
    storage: FlatLayout | None = None             # the memory of a model that is initialised
    _hooks: Hooks | None = None

    def __repr__(self) -> str:
        """The modules below, each on a line of its own, as PyTorch prints them."""
        from mpitrain.nn.printed import printed  # few models are printed
        return printed(self)

    def forward(self, *inputs: Any) -> Any:
        raise GraphError(f"{type(self).__name__} defines no forward")

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """`forward`, between hooks; a layer of ours that fails says so in one line, as an op does. Inputs by name (`ByName`)
        become keywords."""
        if inputs and inputs[0].__class__ is ByName:
            inputs, named = inputs[1:], {**inputs[0], **named}
        try:
            if self._hooks is None and self.across is None and not recorders:
                return self.forward(*inputs, **named)
            return self._called(inputs, named)
        except FAILURES as error:
            if not type(self).__module__.startswith("mpitrain."):
                raise
            from mpitrain.ops.mistakes import told  # few calls are wrong
            message = told(self.forward, inputs, named, error)
            if message is None:
                raise
            raise message from error

    def _called(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        forward = self.forward if self.across is None else partial(self.across.forward, self.forward)
        if recorders:
            forward = within(self.path, forward)
        return forward(*inputs, **named) if self._hooks is None else self._hooks.call(self, forward, inputs, named)

    def positions(self, length: int) -> Places:
        """The places in the sample of `length` positions that are here: 0, 1, ... unless a rank has some of each sample's."""
        return np.arange(length) if self.spread is None else self.spread(length)

    def _members(self) -> Iterator[tuple[str, Any]]:
        """(name, Module or Parameter or Buffer) in order of assignment; lists count as "name.0", "name.1", ..."""
        for name, value in vars(self).items():
            if value.__class__ in PLAIN:          # most attributes: a walk of GPT-2 takes half as long
                continue
            if isinstance(value, (Module, Described)):
                yield name, value
            elif isinstance(value, (list, tuple)):
                yield from ((f"{name}.{i}", item) for i, item in enumerate(value) if isinstance(item, (Module, Described)))

    def _leaves(self) -> Iterator[tuple[str, Described]]:
        for name, child in self._members():
            if isinstance(child, Module):
                for rest, leaf in child._leaves():
                    yield f"{name}.{rest}", leaf
            else:
                yield name, child

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Each parameter once, in order; a shared one under its first name."""
        return _once((name, leaf) for name, leaf in self._leaves() if isinstance(leaf, Parameter))

    def named_buffers(self) -> Iterator[tuple[str, Buffer]]:
        return _once((name, leaf) for name, leaf in self._leaves() if isinstance(leaf, Buffer))

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The modules right below this one, each once; those of a list count as "name.0", "name.1", ..."""
        return _once((name, child) for name, child in self._members() if isinstance(child, Module))

    def children(self) -> Iterator[Module]:
        return (child for _, child in self.named_children())

    def modules(self) -> Iterator[Module]:
        """This module and all below it, each once."""
        return (module for _, module in self.named_modules())

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """This module (under the name "") and all below it, each once."""
        return _once(self._modules())

    def _modules(self) -> Iterator[tuple[str, Module]]:
        yield "", self
        for name, child in self._members():
            if isinstance(child, Module):
                for rest, module in child._modules():
                    yield f"{name}.{rest}" if rest else name, module

    def replace(self, part: Described | Module, by: Described | Module) -> None:
        """Uses `by` wherever this module itself, not one below it, uses `part`, a leaf or a module."""
        for name, value in list(vars(self).items()):
            if value is part:
                setattr(self, name, by)
            elif isinstance(value, (list, tuple)) and any(item is part for item in value):
                setattr(self, name, type(value)([by if item is part else item for item in value]))
            elif isinstance(value, dict):
                value.update({key: by for key, item in value.items() if item is part})

    def resized(self) -> None:
        """Called when parameters and buffers have got other shapes: sizes that the module itself keeps follow."""

    def parameters(self) -> list[Parameter]:
        return [p for _, p in self.named_parameters()]

    def apply(self: Self, function: Callable[[Module], Any]) -> Self:
        """Calls `function` with each module below this one, the lowest first, and then with this one."""
        for child in self.children():
            child.apply(function)
        function(self)
        return self

    def requires_grad_(self: Self, requires_grad: bool = True) -> Self:
        """Freezes all parameters (False), as a frozen group of an optimizer does, or has them trained; before a run begins."""
        for parameter in self.parameters():
            parameter.requires_grad = requires_grad
        return self

    def zero_grad(self) -> None:
        """Forgets all gradients; the optimizer's does that, too."""
        for parameter in self.parameters():
            parameter.zero_grad()

    def count_parameters(self) -> int:
        """The number of trained values; tied parameters count once."""
        return sum(p.size for p in self.parameters() if not p.twin_of)

    def initialize(self, seed: int = 0, dtype: str = "float32", device: Device = CPU,
                   allocate: Allocate | None = None) -> FlatStorage:
        """Gives the model memory and its initial values: functions of (seed, parameter name, element index) alone."""
        storage = self.allocate(dtype, device, allocate)
        storage.initialise(seed)
        self._fill_buffers(seed, storage)
        return storage

    def describe(self, seed: int = 0, dtype: str = "float32", device: Device = CPU) -> FlatLayout:
        """Names everything and gives the buffers their values; the parameters' memory comes, and goes, with somebody else."""
        layout = self.storage = FlatLayout(self._name(dtype), dtype, device)
        self._fill_buffers(seed, layout)
        return layout

    def _fill_buffers(self, seed: int, storage: FlatLayout) -> None:
        device = storage.device
        for _, buffer in self.named_buffers():
            values = device.xp.empty(buffer.size, buffer.dtype_in(storage.dtype))
            buffer.fill(seed, values, 0, device.xp)
            buffer.array, buffer.floats = values.reshape(buffer.shape), storage.dtype
            buffer.mark_changed()

    def allocate(self, dtype: str = "float32", device: Device = CPU, allocate: Allocate | None = None) -> FlatStorage:
        """Names everything and gives the parameters memory, whose values are undefined until somebody writes them."""
        storage = self.storage = FlatStorage(self._name(dtype), dtype, device, allocate)
        return storage

    def _name(self, dtype: str) -> list[Parameter]:
        """Names everything; the parameters in order."""
        float_dtype(dtype)                        # a mistyped precision is refused before anything is touched
        leaves = list(_once(self._leaves()))
        for name, leaf in leaves:
            leaf.name = name
        for name, module in self.named_modules():
            module.path = name
        return [leaf for _, leaf in leaves if isinstance(leaf, Parameter)]

    def state_dict(self) -> dict[str, Array]:
        """The values of all parameters and buffers by name: views, not copies, read-only on the host."""
        return {name: leaf.data for name, leaf in (*self.named_parameters(), *self.named_buffers())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies values in by name. Raises ShapeError, and changes nothing, unless names and shapes are exactly the model's."""
        own: dict[str, Described] = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        check_state({name: leaf.shape for name, leaf in own.items()}, state, "the model")
        for name, leaf in own.items():
            values = state[name].array if isinstance(state[name], Tensor) else state[name]
            leaf.xp.copyto(leaf.master, leaf.xp.asarray(values, dtype=leaf.master.dtype))
            leaf.mark_changed()
        self.round_parameters()

    def round_parameters(self) -> None:
        """Makes the copies in 16 bits of parameters anew, where a device computes with such copies."""
        for parameter in self.parameters():
            parameter.round()

    def train(self: Self, training: bool = True) -> Self:
        """Dropout drops, batch norm uses the batch's statistics; `eval()` is the opposite."""
        for _, module in self.named_modules():
            module.training = training
        return self

    def eval(self: Self) -> Self:
        return self.train(False)

    if not TYPE_CHECKING:                         # a mistyped name is mypy's to find

        def __getattr__(self, name: str) -> Any:
            """Says what PyTorch's is here."""
            from mpitrain.ops.pytorch import MODULE, UnknownName  # few names are wrong
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)         # a property whose own lines failed: its error
            raise UnknownName(type(self).__name__, name, MODULE)

    def before_forward(self, hook: Hook) -> Callable[[], None]:
        """``hook(module, inputs)`` before each forward, until the function that this returns, as those below do, is called."""
        return self._add(hook, "before_forward")

    def after_forward(self, hook: Hook) -> Callable[[], None]:
        """``hook(module, inputs, output)`` after each forward."""
        return self._add(hook, "after_forward")

    def before_backward(self, hook: Hook) -> Callable[[], None]:
        """``hook(module)`` when backward comes to the module's outputs."""
        return self._add(hook, "before_backward")

    def after_backward(self, hook: Hook) -> Callable[[], None]:
        """``hook(module)`` when backward has passed everything the module computed."""
        return self._add(hook, "after_backward")

    def _add(self, hook: Hook, moment: str) -> Callable[[], None]:
        if self._hooks is None:
            self._hooks = Hooks()
        hooks: list[Hook] = getattr(self._hooks, moment)
        hooks.append(hook)
        return lambda: hooks.remove(hook)


def declared(module: Module, what: str) -> Any:
    """The attribute `what` of a module, or of its class; a class with a `forward` of its own must declare it anew."""
    if what in vars(module):
        return vars(module)[what]
    for kind in type(module).__mro__:
        if what in vars(kind):
            return vars(kind)[what]
        if "forward" in vars(kind):
            break
    return vars(Module)[what]


Item = TypeVar("Item")


def _once(items: Iterator[tuple[str, Item]]) -> Iterator[tuple[str, Item]]:
    seen: set[int] = set()
    for name, item in items:
        if id(item) not in seen:
            seen.add(id(item))
            yield name, item
