"""The sections of what makes a model smaller: pruning, low-rank adapters, distillation."""
# Annotations are read as they are, so that no text has to be evaluated: no `from __future__ import annotations` here.

from dataclasses import dataclass
from typing import Any, Literal

from mpitrain.registry import Registry

PRUNERS: Registry[Any] = Registry("pruning rule")
for _name, _rule in (("magnitude", "Magnitude"), ("n:m", "NOfM"), ("block", "Block")):
    PRUNERS.register_later(_name, f"mpitrain.shrink.rules:{_rule}")


@dataclass(frozen=True)
class ShrinkConfig:
    prune: str = ""                          # one of PRUNERS; or the user's own rule, "file.py:name"; "": nothing is pruned
    sparsity: float = 0.0                    # share of zeros in the end; the pattern of "n:m" has its own
    pattern: str = ""                        # "2:4" of "n:m", "16x1" (rows x columns) of "block"
    scope: Literal["layer", "global"] = "layer"      # whose smallest weights are pruned: each layer's, or those of all
    begin: int = 0                           # steps; cubic from begin to end
    end: int = 0
    every: int = 1
    rewind: int | str = "never"              # the step whose weights all go back to at the end, once
    skip: tuple[str, ...] = ()               # layers that stay whole: names, with *
    products: Literal["sparse", "dense"] = "sparse"      # "sparse": of what is left, in layers where that is faster
    quantize: str = ""                       # one of FORMATS, which the weights of linear layers are rounded to at each step
    least: int = 1 << 16                     # linear layers with fewer weights stay as they are in that


@dataclass(frozen=True)
class LoraConfig:
    rank: int = 0                            # of what is added to a frozen weight; 0: nothing is
    alpha: float = 16.0                      # alpha / rank is its factor
    layers: tuple[str, ...] = ("block*.attention.qkv", "block*.attention.out")       # names of linear layers, with *


@dataclass(frozen=True)
class DistilConfig:
    teacher: str = ""                        # a run folder, whose outputs are learned too
    predictions: str = ""                    # or a file of outputs that `predict` wrote, of the rows of data.path
    temperature: float = 4.0
    weight: float = 0.5                      # of the teacher's part of the loss

    @property
    def teaches(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.teacher or self.predictions)
