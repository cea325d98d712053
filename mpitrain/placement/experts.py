"""Which experts a rank along axis ep has: a share of those of every mixture."""

from __future__ import annotations

import math

from mpitrain.errors import MeshError
from mpitrain.nn import MixtureOfExperts, Module, Parameter, mixtures

AXIS = "ep"


def cut_experts(model: Module, rank: int, n: int) -> list[tuple[str, MixtureOfExperts]]:
    """Leaves each mixture of the model its share of the experts; they are given back with their names.

    MeshError where there is none, or n does not divide their number.
    """
    found = mixtures(model)
    if not found:
        raise MeshError(f"mesh.ep = {n} shares out experts over ranks, and the model has none; set mesh.ep = 1 and use mesh.dp, "
                        "or give the model experts (of gpt: model.experts)")
    fitting = math.gcd(*(layer.experts for _, layer in found))
    good = [m for m in range(1, fitting + 1) if fitting % m == 0]
    for path, layer in found:
        if layer.experts % n:
            near = [*[m for m in good if m < n][-1:], *[m for m in good if m > n][:1]]
            raise MeshError(f'mesh.ep = {n} does not divide the {layer.experts} experts of "{path}"; the nearest that fits '
                            f"the whole model: mesh.ep = {' or '.join(map(str, near))}")
        share = layer.experts // n
        for leaf in vars(layer).values():
            if isinstance(leaf, Parameter):                   # the router's is its own layer's
                leaf.narrow(AXIS, 0, rank * share, (rank + 1) * share)
    return found
