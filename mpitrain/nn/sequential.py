"""Sequential: named blocks, each fed with the result of the one before; what a pipeline cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mpitrain.autograd import recompute
from mpitrain.errors import ShapeError
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Described


class Sequential(Module):
    """``Sequential(("first", Linear(4, 8)), ("act", ReLU()))``; blocks given without a name are called "0", "1", ...

    Blocks that `recompute` is about keep their input instead of their activations and run again in backward: True is about all, a
    number about so many, the first ones (of a slice: its first ones), a set about those of these names. `between`, where set, is
    called after each block: messages in flight want to be looked after.
    """

    by_position = True                        # where its blocks do
    recompute: bool | int | frozenset[str] = False
    between: Callable[[], None] | None = None

    def __init__(self, *blocks: Module | tuple[str, Module]):
        named = [(str(i), block) if isinstance(block, Module) else block for i, block in enumerate(blocks)]
        self.blocks: dict[str, Module] = dict(named)
        self.full_names: dict[int, str] = {}      # of a slice: what the whole model calls a shared parameter
        if len(self.blocks) < len(named):
            raise ShapeError(f"the blocks of a Sequential need different names, got {[name for name, _ in named]}")

    def forward(self, x: Any) -> Any:
        for place, (name, block) in enumerate(self.blocks.items()):
            x = recompute(block, x) if self.recompute and self.recomputes(place, name) else block(x)
            if self.between is not None:
                self.between()
        return x

    def recomputes(self, place: int, name: str) -> bool:
        """Whether the block of that place and name runs again in backward."""
        which = self.recompute
        return name in which if isinstance(which, frozenset) else which is True or place < which

    def children(self) -> Iterator[tuple[str, Any]]:
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

    def untie(self) -> None:
        """Gives every block that shares a parameter with an earlier one a twin of it: a parameter of its own, with those values.

        Blocks then own what they use, so they may live on different ranks, and each use's gradients are summed apart. Whoever
        trains the model adds up the gradients of twins, which so stay equal. To be called before memory is given.
        """
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
        part.recompute = self.recompute
        part.full_names = {id(p): name for name, p in self.named_parameters()}
        return part
