"""Autoencoders of images: a convolutional one, and a variational one (Kingma and Welling 2014).

Letters: `N` batch, `C` channels, `S` side of an image, `P` = C * S * S, `Z` numbers of the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.backend import Array, asnumpy, random
from mpitrain.errors import ShapeError
from mpitrain.kernels.random import normal
from mpitrain.models.registry import require_list_of_sizes, require_sizes
from mpitrain.nn.basic import Check

__all__ = ["autoencoder", "vae"]


class Unflatten(nn.Module):
    """(N, I) to (N, channels, side, side)."""

    def __init__(self, channels: int, side: int):
        self.channels, self.side = channels, side

    def forward(self, x: Any) -> Tensor:
        return ops.reshape(x, x.shape[0], self.channels, self.side, self.side)


def noise(x: Tensor, layer: str) -> Array:
    """Standard normal numbers in the shape of x (N, ...): those of the samples of its rows, for this use of `layer`."""
    scope, width = random.current(), x.size // max(len(x), 1)
    key, rows = scope.key(layer), asnumpy(scope.rows(len(x), x.xp))
    drawn = [normal(key, int(row) * width, width, x.xp) for row in rows]
    return x.xp.concatenate(drawn).reshape(x.shape).astype(x.dtype)


class Draw(nn.Module):
    """(N, 2 Z), means and logarithms of variances, to (N, 3 Z): a code drawn from that normal distribution, and both of them.

    The numbers drawn are a function of (seed, step, sample, the layer's name), as in dropout; in evaluation the code is the mean.
    """

    def forward(self, x: Any) -> Tensor:
        codes = x.shape[1] // 2
        mean, log_variance = x[:, :codes], x[:, codes:]
        code = mean + ops.exp(0.5 * log_variance) * noise(mean, self.path) if self.training else mean
        return ops.concatenate([code, x], 1)


class Decode(nn.Module):
    """(N, 3 Z) to (N, P + 2 Z): what `decoder` makes of the code (N, Z), flat, with the means and logarithms beside it."""

    def __init__(self, codes: int, decoder: nn.Sequential):
        self.codes, self.decoder = codes, decoder

    def forward(self, x: Any) -> Tensor:
        image = self.decoder(x[:, :self.codes])
        return ops.concatenate([ops.reshape(image, x.shape[0], -1), x[:, self.codes:]], 1)


def _ends(channels: int, size: int, widths: Sequence[int], code: int, codes: int
          ) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]]:
    """(The encoder, which gives `codes` numbers; the decoder, which takes `code` of them), as named blocks."""
    require_sizes(channels=channels, size=size, code=code)
    require_list_of_sizes("widths", widths)
    planes, side = [channels, *widths], size // 2 ** len(widths)
    if size % 2 ** len(widths):
        raise ShapeError(f"images of {size}x{size} cannot be halved {len(widths)} times; set model.size to a multiple of "
                         f"{2 ** len(widths)}, or fewer model.widths")
    numbers = planes[-1] * side * side
    encoder: list[tuple[str, nn.Module]] = []
    decoder: list[tuple[str, nn.Module]] = [
        ("decode", nn.Linear(code, numbers, activation="relu")), ("image", Unflatten(planes[-1], side))]
    for i, (inputs, outputs) in enumerate(zip(planes, planes[1:])):
        encoder += [(f"down{i}", nn.Conv2d(inputs, outputs, 4, stride=2, padding=1)), (f"relu{i}", nn.ReLU())]
    for i in reversed(range(len(widths))):
        decoder.append((f"up{i}", nn.ConvTranspose2d(planes[i + 1], planes[i], 4, stride=2, padding=1)))
        if i:
            decoder.append((f"up_relu{i}", nn.ReLU()))
    return [*encoder, ("flatten", nn.Flatten()), ("encode", nn.Linear(numbers, codes))], decoder


def _plan(widths: Sequence[int], decode: str) -> dict[str, str]:
    """The layers next to the code are cut, which have most of the parameters."""
    around = {f"down{len(widths) - 1}": "column", "encode": "row"} if widths else {}
    return {**around, decode: "gathered"}


def autoencoder(channels: int = 1, size: int = 28, widths: Sequence[int] = (16, 32), code: int = 32) -> nn.Sequential:
    """Images (N, channels, size, size) to `code` numbers and back, by convolutions that halve and double (Hinton and
    Salakhutdinov 2006, with convolutions).

    `widths` are the channels after each halving. Without a last activation: train with "mse", or with "binary_cross_entropy",
    which takes outputs as logits.
    """
    encoder, decoder = _ends(channels, size, widths, code, code)
    model = nn.Sequential(("input", Check("autoencoder", (None, channels, size, size), "set model.channels and model.size")),
                          *encoder, *decoder)
    model.plan = _plan(widths, "decode")
    return model


def vae(channels: int = 1, size: int = 28, widths: Sequence[int] = (16, 32), code: int = 16) -> nn.Sequential:
    """A variational autoencoder; see `autoencoder`. Its output (N, P + 2 code) is the image, flat, then the means and the
    logarithms of the variances of the code: what the loss "elbo" takes.
    """
    encoder, decoder = _ends(channels, size, widths, code, 2 * code)
    model = nn.Sequential(("input", Check("vae", (None, channels, size, size), "set model.channels and model.size")),
                          *encoder, ("draw", Draw()), ("decoder", Decode(code, nn.Sequential(*decoder))))
    model.plan = _plan(widths, "decoder.decoder.decode")
    return model
