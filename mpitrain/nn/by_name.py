"""What a model gets where its inputs have names."""

from __future__ import annotations

from mpitrain.autograd import Tensor


class ByName(dict[str, Tensor]):
    """Tensors by the names that `data.x` gives them. A module that is called with one, ``model(given)``, gets each as the
    keyword argument of its name: ``forward(self, tokens, types=None)``. `Sequential` hands them to its first block.

    They come from data: no gradient is asked of them.
    """

    requires_grad = False
    grad: Tensor | None = None
