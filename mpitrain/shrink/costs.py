"""What the products of a model cost a kernel, in multiply-adds of its inner loop; work counts those of the definition instead.

A kernel computes outputs in columns of 8, so 9 cost what 16 do. A convolution of 3 x 3 with stride 1 between 16 channels or more
takes 4 multiplications for 9 (Winograd; Lavin and Gray 2016) and turns its tiles for that. And numbers go through memory. The
constants fit the times of ResNet-20's convolutions (batches of 64, one thread of an AMD EPYC (Zen 5), 2026-11), which are
0.49 to 0.69 ns for 1,000 of these units, where they are 0.44 to 1.0 ns for 1,000 multiply-adds of the definition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from mpitrain.shrink.graph import Key, Product

COLUMNS = 8                        # outputs that a kernel computes together
LEAST = 16                         # channels on both sides of a convolution from which on tiles are turned
TURNED, TURNING = 4, 25            # multiplications of an output for a window of 9; what turning a number costs
MOVED = 10                         # what a number read or written costs


def work(products: Iterable[Product], counts: Mapping[Key, int]) -> int:
    """Multiply-adds of a sample, with so many indices left in some dims."""
    return sum(p.positions * math.prod(_shape(p, counts)) for p in products)


def cost(products: Iterable[Product], counts: Mapping[Key, int]) -> float:
    """What a kernel takes for a sample."""
    return sum(_cost(p, *_shape(p, counts)) for p in products)


def _cost(product: Product, outputs: int, inputs: int, *window: int) -> float:
    columns = -(-outputs // COLUMNS) * COLUMNS
    if product.turned and min(outputs, inputs) >= LEAST:
        return product.positions * (TURNED * columns * inputs + TURNING * (outputs + inputs))
    return product.positions * (columns * inputs * math.prod(window) + MOVED * outputs) + MOVED * inputs * product.places


def _shape(product: Product, counts: Mapping[Key, int]) -> list[int]:
    return [counts.get((product.name, dim), n) for dim, n in enumerate(product.shape)]
