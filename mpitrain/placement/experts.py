"""The experts of a rank along axis ep: a share of those of every mixture."""

from __future__ import annotations

import math

from mpitrain.errors import MeshError
from mpitrain.nn import MixtureOfExperts, Module, Parameter, mixtures
from mpitrain.placement.tensor_plan import nearest_text

AXIS = "ep"


def cut_experts(model: Module, rank: int, n: int) -> list[tuple[str, MixtureOfExperts]]:
    """Cuts the experts of each mixture to this rank's share; returns the mixtures with their names.

    MeshError where there is no mixture, or n does not divide the number of experts.
    """
    found = mixtures(model)
    if not found:
        raise MeshError(f"mesh.ep = {n} shares out experts over ranks, and the model has none; set mesh.ep = 1 and use mesh.dp, "
                        "or give the model experts (of gpt: model.experts)")
    fitting = math.gcd(*(layer.experts for _, layer in found))
    good = [m for m in range(1, fitting + 1) if fitting % m == 0]
    for path, layer in found:
        if layer.experts % n:
            raise MeshError(f'mesh.ep = {n} does not divide the {layer.experts} experts of "{path}"; '
                            f"{nearest_text(AXIS, n, good)}")
        share = layer.experts // n
        for leaf in vars(layer).values():
            if isinstance(leaf, Parameter):                   # The router is a layer of its own.
                leaf.narrow(AXIS, 0, rank * share, (rank + 1) * share)
    return found
