"""Multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

from mpitrain.models.registry import MODELS, require_list_of_sizes, require_sizes
from mpitrain.nn import Flatten, Linear, Module, Sequential, init
from mpitrain.nn.activation import ACTIVATIONS


@MODELS.register("mlp")
def mlp(inputs: int, hidden: Sequence[int], outputs: int, activation: str = "relu") -> Sequential:
    """Linear layers with an activation between; a sample of any shape with `inputs` numbers (an image) is flattened.

    Weights are He's for ReLU and its kin; the last layer's, and those before other activations, are Glorot's.
    """
    require_sizes(inputs=inputs, outputs=outputs)
    require_list_of_sizes("hidden", hidden)
    ACTIVATIONS.resolve(activation)               # A misspelt name is refused also where no layer asks for it.
    rectifying = activation in ("relu", "leaky_relu", "gelu", "silu")
    sizes = [inputs, *hidden]
    blocks: list[tuple[str, Module]] = [("flatten", Flatten(inputs))]
    for i, (width, next_width) in enumerate(zip(sizes, sizes[1:])):
        weights = init.kaiming_normal() if rectifying else init.xavier_uniform()
        blocks.append((f"linear{i}", Linear(width, next_width, activation=activation, weight_init=weights, bias_init=init.zeros)))
    head = Linear(sizes[-1], outputs, weight_init=init.xavier_uniform(), bias_init=init.zeros)
    model = Sequential(*blocks, ("head", head))
    pairs = [f"linear{i}" for i in range(len(hidden))] + ["head"]  # A column is followed by a row; a last one stays whole.
    model.plan = {name: ("column", "row")[i % 2] for i, name in enumerate(pairs[:len(pairs) // 2 * 2])}
    model.size_keys = {"hidden": pairs[:-1]}
    return model
