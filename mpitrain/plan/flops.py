"""The multiply-adds of a model's forward pass, counted from the shapes that its operations meet; no product is computed.

    sample -> [Function]  elementwise, norms, pools, reshapes: run as they are, on arrays of a few samples
              [Function that multiplies]  adds its multiply-adds to the count and gives zeros of its result's shape

Counted are linear layers, convolutions and their transposes, matrix products and contractions, both products of attention,
recurrent layers and experts, as torch.utils.flop_counter and the tables beside torchvision's weights count them (the latter in
multiply-adds, each of which is two operations). Of sparse layers the numbers that they keep count, of layers in few bits all.
What norms, activations and pools do is left out there and here. Fourier transforms are no products of matrices: their number is
given. A product of complex numbers is four of real ones. Parameters take next to no memory (`plan.lent`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpitrain.autograd import Function, Tensor, in_place_of_forward, no_grad
from mpitrain.backend import Array, random
from mpitrain.nn import Module
from mpitrain.nn.by_name import ByName
from mpitrain.ops.attention import Attention, MaskedAttention, SelfAttention
from mpitrain.ops.contraction import Contract
from mpitrain.ops.conv import Conv2d, ConvTranspose2d
from mpitrain.ops.experts import ExpertLinear
from mpitrain.ops.linalg import Linear, MatMul
from mpitrain.ops.recurrent import Layer
from mpitrain.ops.spectral import FullTransform, HalfTransform, RealTransform
from mpitrain.plan.lent import lent_memory

Shape: TypeAlias = tuple[int, ...]
Counted: TypeAlias = "tuple[int, list[Shape]]"         # multiply-adds, and the shapes of the results
Rule: TypeAlias = "Callable[..., Counted]"

TRAINING = 3                 # passes' worth of products of a training step: forward, gradients of inputs and of weights
TRANSFORMS = (FullTransform, HalfTransform, RealTransform)


class Work(NamedTuple):
    """Multiply-adds of one sample's forward pass, by Function, and how many Fourier transforms, whose work is not in them."""

    by_function: dict[str, int]
    transforms: int

    @property
    def forward(self) -> int:
        return sum(self.by_function.values())

    @property
    def training(self) -> int:
        """Of a training step: each product has two gradients of its size (the model's input wants none, which is ignored)."""
        return TRAINING * self.forward


class Product(NamedTuple):
    """A product of a forward pass: its Function, the multiply-adds of a sample, and how many numbers its weights are."""

    function: str
    multiply_adds: int
    weights: int


def count(model: Module, sample: Array | ByName) -> Work:
    """The work of `model`, which has been described or not and keeps no memory from this, on one sample (1, ...), or on inputs by
    name of one sample, in float32.

    Numbers in the sample count for nothing but token numbers, which must be in the vocabulary.
    """
    work: Counter[str] = Counter()
    for product in products(model, sample):
        work[product.function] += product.multiply_adds
    transforms = sum(work.pop(function.__name__, 0) for function in TRANSFORMS)
    return Work({name: n for name, n in work.items() if n}, transforms)


def products(model: Module, sample: Array | ByName) -> list[Product]:
    """The products of the forward pass in their order, as `count` adds them up; a Fourier transform is one multiply-add here."""
    given = sample if isinstance(sample, ByName) else Tensor(
        sample.astype(np.float32) if sample.dtype.kind == "f" else sample)
    was = [module for module in model.modules() if module.training]
    model.eval()
    try:
        scope = random.Scope(0, 0, np.zeros(1, np.uint64))
        with lent_memory([model], "float32"), no_grad(), counting() as found, random.use(scope):
            model(given)
    finally:
        for module in was:
            module.training = True
    return found


@contextmanager
def counting(others: list[int] | None = None) -> Iterator[list[Product]]:
    """The Functions of RULES, and those that inherit their forward, count in this thread while it is entered, and give zeros.

    `others` gets the number of elements that each other Function writes; views write none.
    """
    found: list[Product] = []
    rules = {function.forward: rule for function, rule in RULES.items()}
    rules |= {getattr(sys.modules[module], name).forward: rule for (module, name), rule in LATE.items() if module in sys.modules}
    noted = {function.forward for function in TRANSFORMS}

    def forward_of(function: type[Function]) -> Callable[..., Any]:
        forward = function.forward
        if forward in rules:
            return _standing_in(rules[forward], found)
        if forward in noted:
            return _noted(forward, found)
        return forward if others is None else _written(forward, others)
    with in_place_of_forward(forward_of):
        yield found


def _standing_in(rule: Rule, found: list[Product]) -> Callable[..., Any]:
    def forward(ctx: Any, *arrays: Any, **params: Any) -> Any:
        multiply_adds, shapes = rule(ctx.function, *arrays, **params)
        kinds = [array.dtype for array in arrays[:2] if array is not None]
        multiply_adds *= prod(2 if kind.kind == "c" else 1 for kind in kinds)
        found.append(Product(ctx.function.__name__, multiply_adds, getattr(arrays[1], "size", 0) if len(arrays) > 1 else 0))
        made = [np.zeros(shape, np.result_type(*kinds)) for shape in shapes]
        return made[0] if len(made) == 1 else tuple(made)
    return forward


def _noted(forward: Callable[..., Any], found: list[Product]) -> Callable[..., Any]:
    def noted(ctx: Any, *arrays: Any, **params: Any) -> Any:
        found.append(Product(ctx.function.__name__, 1, 0))
        return forward(ctx, *arrays, **params)
    return noted


def _written(forward: Callable[..., Any], others: list[int]) -> Callable[..., Any]:
    def written(ctx: Any, *arrays: Any, **params: Any) -> Any:
        made = forward(ctx, *arrays, **params)
        results = made if isinstance(made, tuple) else (made,)
        others.append(sum(result.size for result in results if not any(
            np.may_share_memory(result, array) for array in arrays if array is not None)))
        return made
    return written


def _linear(_: Any, x: Array, weight: Array, bias: Array | None, **params: Any) -> Counted:
    shape = (*x.shape[:-1], weight.shape[0])
    return prod(shape) * weight.shape[1], [shape]


def _matmul(_: Any, x: Array, y: Array, **params: Any) -> Counted:
    left, right = (1, *x.shape) if x.ndim == 1 else x.shape, (*y.shape, 1) if y.ndim == 1 else y.shape
    lead = np.broadcast_shapes(left[:-2], right[:-2])
    shape = (*lead, *left[-2:-1][x.ndim == 1:], *right[-1:][y.ndim == 1:])
    return prod(lead) * left[-2] * left[-1] * right[-1], [shape]


def _contract(_: Any, x: Array, y: Array, *, spec: Any) -> Counted:
    of_x, of_y, result = spec
    sizes = dict(zip((*of_x, *of_y), (*x.shape, *y.shape)))
    is_product = any(i not in result for i in of_x)
    return prod(sizes.values()) if is_product else 0, [tuple(sizes[i] for i in result)]


def _convolution(_: Any, x: Array, weight: Array, bias: Array | None, *, window: Any, **params: Any) -> Counted:
    shape = (len(x), weight.shape[0], *window.outputs(*x.shape[2:]))
    return prod(shape) * prod(weight.shape[1:]), [shape]


def _transposed(_: Any, x: Array, weight: Array, bias: Array | None, *, groups: int, size: Any, **params: Any) -> Counted:
    return x.size * prod(weight.shape[1:]), [(len(x), weight.shape[1] * groups, *size)]


def _attention(_: Any, q: Array, k: Array, v: Array, *mask: Any, **params: Any) -> Counted:
    """Scores and mixtures of all pairs, as if nothing were masked."""
    return prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1]), [(*q.shape[:-1], v.shape[-1])]


def _self_attention(_: Any, qkv: Array, **params: Any) -> Counted:
    batch, length, width = qkv.shape
    return 2 * batch * length * length * (width // 3), [(batch, length, width // 3)]


def _recurrent(layer: Any, x: Array, w_input: Array, w_state: Array, b_input: Any, b_state: Any, projection: Array | None,
               *states: Any, sizes: Array, **params: Any) -> Counted:
    width, hidden = w_state.shape[1], len(w_state) // layer.gates
    each = w_input.size + w_state.size + (0 if projection is None else projection.size)
    return len(x) * each, [(len(x), width), *((int(sizes[0]), size) for size in (width, hidden)[:layer.n_states])]


def _experts(_: Any, x: Array, weight: Array, *rest: Any, **params: Any) -> Counted:
    shape = (*x.shape[:-1], weight.shape[1])
    return prod(shape) * weight.shape[2], [shape]


def _sparse(_: Any, x: Array, bias: Array | None, *, sparse: Any, **params: Any) -> Counted:
    from mpitrain.kernels.sparse import pieces_of
    height = 1 if sparse.values.ndim == 1 else sparse.values.shape[1]
    outputs = (len(sparse.starts) - 1) // pieces_of(x.shape[-1]) * height
    return prod(x.shape[:-1]) * sparse.values.size, [(*x.shape[:-1], outputs)]


def _blocks(_: Any, x: Array, weight: Array, bias: Array | None, *, blocks: Any, **params: Any) -> Counted:
    height = len(weight) // len(blocks.live)
    return prod(x.shape[:-1]) * int(blocks.live.sum()) * height, [(*x.shape[:-1], len(weight))]


def _low_bits(_: Any, x: Array, bias: Array | None, *, layer: Any, **params: Any) -> Counted:
    shape = (*x.shape[:-1], layer.outputs)
    return prod(shape) * layer.inputs, [shape]


RULES: dict[type[Function], Rule] = {
    Linear: _linear, MatMul: _matmul, Contract: _contract, Conv2d: _convolution, ConvTranspose2d: _transposed,
    Attention: _attention, MaskedAttention: _attention, SelfAttention: _self_attention, Layer: _recurrent, ExpertLinear: _experts}
"""Function -> its multiply-adds and the shapes of its results, from its inputs."""

LATE: dict[tuple[str, str], Rule] = {
    ("mpitrain.nn.sparse", "SparseProduct"): _sparse, ("mpitrain.nn.sparse", "BlockProduct"): _blocks,
    ("mpitrain.nn.lowbit", "LowBitProduct"): _low_bits}
"""The same of Functions by (module, name), whose modules few models read."""
