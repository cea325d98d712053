"""The layers of image models in the order of the forward pass, and when their gradients are ready.

Models come from the project's zoo, counted by shapes without memory; Inception V3, which it lacks, from its data file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from mpitrain.bench.published.comparison import table

FORWARD = 1 / 3                # of a step's compute: each product has two gradients of its size
SINGLE = 4                     # bytes of a gradient


@dataclass(frozen=True)
class Net:
    """Parameters, multiply-adds of a forward pass, and each layer's shares of both, from the input on."""

    name: str
    parameters: int
    multiply_adds: int
    shares: tuple[tuple[float, float], ...]

    def gradients(self) -> list[tuple[float, float]]:
        """(share of the backward after which it is ready, bytes) of each layer's gradient, in the order of the backward."""
        found, done = [], 0.0
        for of_parameters, of_work in reversed(self.shares):
            done += of_work
            found.append((min(1.0, done), of_parameters * self.parameters * SINGLE))
        return found


@cache
def net(name: str) -> Net:
    """The model of that name. Norms and biases are spread over the layers like their weights."""
    layers, parameters = inception() if name == "inception_v3" else of_the_zoo(name)
    weights, work = sum(layer[0] for layer in layers), sum(layer[1] for layer in layers)
    return Net(name, parameters, work, tuple((weight / weights, each / work) for weight, each in layers))


def inception() -> tuple[list[tuple[int, int]], int]:
    """Weights and multiply-adds of each layer, and the parameters."""
    found = table("inception_v3")
    layers = [(inputs * outputs * height * width, inputs * outputs * height * width * side**2)
              for inputs, outputs, height, width, side in found["layers"]]
    return layers, found["parameters"]


def of_the_zoo(name: str) -> tuple[list[tuple[int, int]], int]:
    """The same of a model that is built in, on images of 224 x 224."""
    import numpy as np

    from mpitrain.models import MODELS
    from mpitrain.plan.flops import products
    model = MODELS[name]()
    found = products(model, np.zeros((1, 3, 224, 224), np.float32))
    return [(product.weights, product.multiply_adds) for product in found], sum(p.size for p in model.parameters())
