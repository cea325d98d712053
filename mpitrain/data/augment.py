"""Augmentations: functions of a row's values and of its key, so that a sample looks the same on any number of ranks.

The user's own are named "pkg.module:name" or "file.py:name": a function `f(x, keys)`, with x of shape (rows, ...) and keys uint64
of shape (rows,).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpitrain.arguments import bound
from mpitrain.data.columns import Columns
from mpitrain.data.keyed import draw
from mpitrain.data.listed import Asked, entries, tables_by_input
from mpitrain.data.shards import Values
from mpitrain.data.transforms import rows_alike
from mpitrain.errors import ConfigError
from mpitrain.registry import Registry

Keys = NDArray[np.uint64]
Augmentation = Callable[[Any, Keys], Any]         # of an array's rows, or, where inputs have names, of `Columns`

BY_INPUT = "data.augment"        # takes a table by input

AUGMENTATIONS: Registry[Augmentation] = Registry("augmentation")


def augmentations(asked: Asked, folder: Path | None = None, *, key: str = BY_INPUT) -> list[Augmentation]:
    """The functions of `data.augment`, in order; inputs by name have some each."""
    if by_input := tables_by_input(asked) if key == BY_INPUT else {}:
        return [partial(of_input, name, function) for name, own in by_input.items()
                for function in augmentations(own, folder, key=f"{key}.{name}")]
    found: list[Augmentation] = []
    for name, arguments in entries(asked, key):
        function = AUGMENTATIONS.resolve(name, folder)
        if not callable(function):
            raise ConfigError(f'{key} "{name}" is a {type(function).__name__}; expected a function f(x, keys)')
        one = bound(function, arguments, f'augmentation "{name}"', "data.augment")
        found.append(Checked(one, f'{key} "{name}"'))
    return found


@dataclass(frozen=True)
class Checked:
    """One function of `data.augment`, which must give as many rows as it gets; `what` is what messages call it."""

    function: Augmentation
    what: str

    def __call__(self, x: Any, keys: Keys) -> Values:
        return rows_alike(self.function, self.what, x, keys)

    @property
    def move(self) -> Callable[[tuple[int, ...], Keys], Move] | None:
        """What draws the parameters of its device form; None where it has none."""
        return MOVES.get(self.function)


def of_input(name: str, function: Augmentation, x: Any, keys: Keys) -> Columns:
    """Inputs by name, one of them augmented."""
    return Columns({own: function(values, keys) if own == name else values for own, values in x.items()})


class Move(NamedTuple):
    """What an augmentation does to images: pixel (i, j) becomes the one at (i + down, j + right), 0 outside, after those images
    that are `mirrored` have been mirrored left to right. Of each image, (rows,); None where it does neither."""

    mirrored: NDArray[np.bool_] | None = None
    down: NDArray[np.int64] | None = None
    right: NDArray[np.int64] | None = None


def _need_images(shape: tuple[int, ...], name: str) -> None:
    if len(shape) != 4:
        raise ConfigError(f'data.augment "{name}" needs images (channels, height, width), but a row has shape {shape[1:]}')


def _flipped(shape: tuple[int, ...], keys: Keys) -> Move:
    _need_images(shape, "flip")
    return Move(mirrored=draw(keys, 0, 2) == 1)


@AUGMENTATIONS.register("flip")
def flip(x: Values, keys: Keys) -> Values:
    """Mirrors every second image (by its key) left to right."""
    chosen = _flipped(x.shape, keys).mirrored
    out = x.copy()
    out[chosen] = x[chosen, :, :, ::-1]
    return out


def _cropped(shape: tuple[int, ...], keys: Keys) -> Move:
    _need_images(shape, "crop")
    pad_h, pad_w = max(1, shape[2] // 8), max(1, shape[3] // 8)
    return Move(down=draw(keys, 1, 2 * pad_h + 1) - pad_h, right=draw(keys, 2, 2 * pad_w + 1) - pad_w)


@AUGMENTATIONS.register("crop")
def crop(x: Values, keys: Keys) -> Values:
    """Shifts each image by up to an eighth of its height and width (4 pixels of 32), filling with zeros."""
    _, down, right = _cropped(x.shape, keys)
    assert down is not None and right is not None
    b, c, h, w = x.shape
    pad_h, pad_w = max(1, h // 8), max(1, w // 8)
    padded = np.pad(x, ((0, 0), (0, 0), (pad_h, pad_h), (pad_w, pad_w)))
    rows = (down[:, None] + (pad_h + np.arange(h)))[:, None, :, None]
    columns = (right[:, None] + (pad_w + np.arange(w)))[:, None, None, :]
    out: Values = padded[np.arange(b)[:, None, None, None], np.arange(c)[None, :, None, None], rows, columns]
    return out


MOVES: dict[Augmentation, Callable[[tuple[int, ...], Keys], Move]] = {flip: _flipped, crop: _cropped}
"""The device forms of augmentations: what each draws of (the shape of x, keys), which a kernel then does (kernels/feed.py)."""
