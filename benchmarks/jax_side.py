"""The models of `mpitrain bench train` in JAX, and their training step: one jitted function that reuses its arguments' memory.

Images are channels last and kernels HWIO, the layout that XLA's convolutions want on a CPU. Parameters are a list in the order of
ours. Imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

EPS = 1e-5                                        # of the norms


def linear(x, w, b=None):
    y = x @ w.T
    return y if b is None else y + b


def conv(x, w, stride: int = 1, padding: int = 0):
    return lax.conv_general_dilated(x, w, (stride, stride), [(padding, padding)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def max_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def mlp(p: Iterator[Any], x, layers: int = 3):
    for i in range(layers):
        x = linear(x, next(p), next(p))
        x = jax.nn.relu(x) if i < layers - 1 else x
    return x


def lenet(p: Iterator[Any], x):
    x = max_pool(jax.nn.relu(conv(x, next(p), padding=2) + next(p)))
    x = max_pool(jax.nn.relu(conv(x, next(p)) + next(p)))
    return mlp(p, x.transpose(0, 3, 1, 2).reshape(len(x), -1))     # our linear layer wants channels first


def batch_norm(p: Iterator[Any], x):
    """With the batch's statistics, as in training."""
    mean, mean_square = x.mean((0, 1, 2)), (x * x).mean((0, 1, 2))
    return (x - mean) * (lax.rsqrt(mean_square - mean * mean + EPS) * next(p)) + next(p)


def resnet20(p: Iterator[Any], x):
    x = jax.nn.relu(batch_norm(p, conv(x, next(p), padding=1)))
    for width, stride in [(16, 1)] * 3 + [(32, 2)] + [(32, 1)] * 2 + [(64, 2)] + [(64, 1)] * 2:
        y = jax.nn.relu(batch_norm(p, conv(x, next(p), stride, 1)))
        y = batch_norm(p, conv(y, next(p), padding=1))
        before = (width - x.shape[3]) // 2
        x = jax.nn.relu(jnp.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (before, before))) + y)
    return linear(x.mean((1, 2)), next(p), next(p))


def layer_norm(p: Iterator[Any], x, bias: bool):
    mean = x.mean(-1, keepdims=True)
    y = (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + EPS) * next(p)
    return y + next(p) if bias else y


def gpt(p: Iterator[Any], tokens, layers: int, heads: int, bias: bool = False):
    def dense(x):
        return linear(x, next(p), next(p) if bias else None)
    token, position = next(p), next(p)
    x = token[tokens] + position[:tokens.shape[1]]
    b, t, c = x.shape
    for _ in range(layers):
        q, k, v = (y.reshape(b, t, heads, c // heads) for y in jnp.split(dense(layer_norm(p, x, bias)), 3, -1))
        x = x + dense(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, c))
        hidden = dense(layer_norm(p, x, bias))
        x = x + dense(jax.nn.gelu(hidden, approximate=False))
    return layer_norm(p, x, bias) @ token.T


MODELS = {"mlp": mlp, "lenet": lenet, "resnet20": resnet20, "gpt-nano": partial(gpt, layers=4, heads=4),
          "gpt-baby": partial(gpt, layers=6, heads=6), "gpt2": partial(gpt, layers=12, heads=12, bias=True)}


def adamw(w, g, m, v, step, lr: float, decay: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8):
    """Loshchilov and Hutter, 2019, with PyTorch's default betas and eps."""
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    change = m / (1 - betas[0] ** step) / (jnp.sqrt(v / (1 - betas[1] ** step)) + eps)
    return w * (1 - lr * decay) - lr * change, m, v


class JaxSide:
    """A training step on fixed batches used in turn, from the initial parameters `values`."""

    def __init__(self, model: Any, batches: Sequence[tuple[Any, Any]], values: Sequence[np.ndarray], *, lr: float, decay: float):
        self.parameters = [jnp.array(np.moveaxis(w, (0, 1), (3, 2)) if w.ndim == 4 else w) for w in values]
        self.first, self.second = ([jnp.zeros_like(w) for w in self.parameters] for _ in range(2))
        self.batches = [(jnp.array(np.moveaxis(x, 1, 3) if x.ndim == 4 else x), jnp.array(y)) for x, y in batches]
        self.steps = 0

        def loss_of(parameters, x, y):
            left = iter(parameters)
            logits = model(left, x)
            assert next(left, None) is None, "the model takes fewer parameters than there are"
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1).mean()

        def train(parameters, first, second, step, x, y):
            loss, gradients = jax.value_and_grad(loss_of)(parameters, x, y)
            updated = [adamw(*arrays, step, lr, decay) for arrays in zip(parameters, gradients, first, second)]
            return loss, *(list(column) for column in zip(*updated))
        self.train = jax.jit(train, donate_argnums=(0, 1, 2))

    def step(self) -> float:
        """The loss before the update."""
        x, y = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        loss, self.parameters, self.first, self.second = self.train(self.parameters, self.first, self.second,
                                                                    jnp.float32(self.steps), x, y)
        jax.block_until_ready(self.parameters)
        return float(loss)
