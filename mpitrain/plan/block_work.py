"""The work of each block of a model, counted from shapes: what a machine that was not measured has to do."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpitrain.autograd import Tensor, no_grad
from mpitrain.backend import Array, random
from mpitrain.nn import Module, Sequential
from mpitrain.nn.by_name import ByName
from mpitrain.plan.flops import TRANSFORMS, counting
from mpitrain.plan.lent import lent_memory


class BlockWork(NamedTuple):
    """One sample's forward pass through a block: multiply-adds, elements that its other operations write, how many operations
    there are, and the block's parameters."""

    multiply_adds: int
    elements: int
    operations: int
    parameters: int


def count_blocks(model: Module, sample: Array | ByName) -> list[BlockWork]:
    """The work of each block of a `Sequential` on one sample (1, ...), in order; of any other model as one block.

    Equal blocks (of one class, with parameters of equal shapes) that are given equal shapes are counted once. The model may be
    described or not, and keeps no memory from this.
    """
    given: Any = sample if isinstance(sample, ByName) else Tensor(
        sample.astype(np.float32) if sample.dtype.kind == "f" else sample)
    blocks = list(model.blocks.values()) if isinstance(model, Sequential) else [model]
    was = [module for module in model.modules() if module.training]
    transforms = {function.__name__ for function in TRANSFORMS}
    others: list[int] = []
    found, known = [], dict[Any, tuple[BlockWork, Any]]()
    model.eval()
    try:
        scope = random.Scope(0, 0, np.zeros(1, np.uint64))
        with lent_memory([model], "float32"), no_grad(), counting(others) as products, random.use(scope):
            for block in blocks:
                shapes = tuple(parameter.shape for parameter in block.parameters())
                key = type(block), repr(block), shapes, tuple(getattr(given, "shape", ()))
                if key not in known:
                    products.clear()
                    others.clear()
                    given = block(given)
                    added = sum(product.multiply_adds for product in products if product.function not in transforms)
                    known[key] = BlockWork(added, sum(others), len(products) + len(others), sum(map(prod, shapes))), given
                counted, given = known[key]
                found.append(counted)
    finally:
        for module in was:
            module.training = True
    return found
