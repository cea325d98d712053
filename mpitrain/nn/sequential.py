"""Sequential: named blocks, each fed with the result of the one before; what a pipeline cuts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from mpitrain.autograd import recompute
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Described

__all__ = ["Sequential"]

Self = TypeVar("Self", bound="Sequential")


class Sequential(Module):
    """``Sequential(("first", Linear(4, 8)), ("act", ReLU()))``; blocks given without a name are called "0", "1", ...

    Blocks that `recompute` is about keep their input instead of their activations and run again in backward: True is about all, a
    number about so many, the first ones (of a slice: its first ones), a set about those of these names. `between`, where set, is
    called after each block: messages in flight want to be looked after.

    Blocks may pass on a tuple of tensors. Between stages of a pipeline one tensor travels: a model whose blocks do so has in
    `join` what makes one of a tuple, which a slice that ends before the model's last block calls, and each block takes either.
    """

    by_position = True                        # Its blocks say whether they do.
    recompute: bool | int | frozenset[str] = False
    between: Callable[[], None] | None = None
    join: Callable[[tuple[Any, ...]], Any] | None = None
    goes_on = False                           # True in a slice that other blocks follow

    def __init__(self, *blocks: Module | tuple[str, Module]):
        self.blocks: dict[str, Module] = {}
        self.full_names: dict[int, str] = {}      # In a slice: the whole model's names of shared parameters.
        self.extend(blocks)

    def append(self: Self, block: Module | tuple[str, Module]) -> Self:
        """One more block at the end, before memory is given; without a name it is called by its place."""
        place = len(self.blocks)
        name, module = str(place), block
        if isinstance(block, tuple) and len(block) == 2 and isinstance(block[0], str):
            name, module = block
        if not isinstance(module, Module):
            raise ShapeError(f"Sequential: block {place} is {module!r:.60}, expected a Module, or a name and one; a function "
                             "is called in the forward of a Module of your own, and activations are Modules, like nn.Tanh()")
        if name in self.blocks:
            raise ShapeError(f"the blocks of a Sequential need different names, got {[*self.blocks, name]}")
        if self.storage is not None:
            raise ShapeError("Sequential: the model has its memory already; append blocks before initialize()")
        self.blocks[name] = module
        return self

    def extend(self: Self, blocks: Iterable[Module | tuple[str, Module]]) -> Self:
        """More blocks at the end, in order; see `append`."""
        for block in blocks:
            self.append(block)
        return self

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The first block gets all that is given, each next one the output of the one before."""
        run: Callable[..., Any]
        for place, (name, block) in enumerate(self.blocks.items()):
            run = partial(block, **named) if place == 0 and named else block
            inputs = (_again(run, *inputs) if self.recompute and self.recomputes(place, name) else run(*inputs)),
            if self.between is not None:
                self.between()
        x = inputs[0]
        return self.join(x) if self.goes_on and self.join is not None and isinstance(x, tuple) else x

    def recomputes(self, place: int, name: str) -> bool:
        """Whether the block of that place and name runs again in backward."""
        which = self.recompute
        return name in which if isinstance(which, frozenset) else which is True or place < which

    def _members(self) -> Iterator[tuple[str, Any]]:
        yield from self.blocks.items()

    def _leaves(self) -> Iterator[tuple[str, Described]]:
        for name, leaf in super()._leaves():
            yield self.full_names.get(id(leaf), name), leaf

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Module]:
        return iter(self.blocks.values())

    def __getitem__(self, key: int | str) -> Module:
        return self.blocks[key] if isinstance(key, str) else list(self.blocks.values())[key]

    def separate(self) -> None:
        """Gives every block that shares a layer with an earlier one a copy of it, which has the same parameters.

        So a layer has one name and one mask of dropout for each block it is used in, whichever of them are here. One that has
        buffers stays shared: both uses are recorded in them. To be called before memory is given.
        """
        seen: set[int] = set()                    # modules and buffers of the blocks so far
        for name, block in self.blocks.items():
            buffers = {id(buffer) for _, buffer in block.named_buffers()}
            if not buffers & seen and any(id(module) in seen for _, module in block.named_modules()):
                leaves: dict[int, Any] = {id(leaf): leaf for _, leaf in (*block.named_parameters(), *block.named_buffers())}
                block = self.blocks[name] = copy.deepcopy(block, leaves)
            seen |= {id(module) for _, module in block.named_modules()} | buffers

    def untie(self) -> None:
        """Gives every block that shares a parameter with an earlier one a twin of it: a parameter of its own, with those values.

        Blocks then own what they use, so they may live on different ranks, and each use's gradients are summed apart. Whoever
        trains the model adds up the gradients of twins, which so stay equal. To be called before memory is given. ConfigError
        where blocks share buffers, which cannot be added up.
        """
        first_users: dict[int, str] = {}
        for name, block in self.blocks.items():
            for leaf_name, buffer in block.named_buffers():
                first = first_users.setdefault(id(buffer), name)
                if first != name:
                    raise ConfigError(f'the blocks "{first}" and "{name}" share the buffer "{name}.{leaf_name}", whose running '
                                      "values cannot be kept apart for each block; give each a layer of its own, or set mesh.pp "
                                      '= 1 and train.reproducible = "run"')
        self.separate()
        names = {id(p): name for name, p in self.named_parameters()}
        owners: dict[int, str] = {}
        for block_name, block in self.blocks.items():
            for _, parameter in list(block.named_parameters()):
                if owners.setdefault(id(parameter), block_name) != block_name:
                    twin = parameter.twin(names[id(parameter)])
                    for _, module in block.named_modules():
                        module.replace(parameter, twin)

    def slice(self, start: int, stop: int) -> Sequential:
        """Blocks [start, stop) as a model: the same blocks, and every parameter keeps the name it has in the whole."""
        part = Sequential(*list(self.blocks.items())[start:stop])
        part.recompute, part.join = self.recompute, self.join
        part.goes_on = self.goes_on or stop < len(self)
        part.full_names = {id(p): name for name, p in self.named_parameters()}
        return part


def _again(run: Callable[..., Any], *inputs: Any) -> Any:
    """What `run` makes of these inputs, the only one of which may be a tuple of tensors, to be computed again in backward."""
    if len(inputs) == 1 and isinstance(inputs[0], tuple):
        return recompute(lambda *parts: run(parts), *inputs[0])
    return recompute(run, *inputs)
