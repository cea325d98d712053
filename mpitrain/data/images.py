"""A folder of images by class -> a folder of shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpitrain.data.keyed import key, permute
from mpitrain.data.shards import Values
from mpitrain.data.writing import refuse_existing, write_shards
from mpitrain.errors import ConfigError, DataError, MissingError, text_of

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


class ImageRows:
    """Image files as rows (channels, height, width) of bytes, decoded when sliced."""

    def __init__(self, files: list[Path], shape: tuple[int, ...], mode: str):
        self.files, self.mode, self.dtype = files, mode, np.dtype(np.uint8)
        self.shape = (len(files), *shape)

    def __getitem__(self, rows: slice) -> Values:
        out = np.empty((len(self.files[rows]), *self.shape[1:]), np.uint8)
        for place, file in zip(out, self.files[rows]):
            pixels, _ = decode_image(file, self.mode)
            if pixels.shape != place.shape:
                raise DataError(f"the image has {'x'.join(map(str, pixels.shape))} values (channels, height, width), but the "
                                f"first image {'x'.join(map(str, place.shape))}; resize it", file=file)
            place[...] = pixels
        return out


def decode_image(file: Path, mode: str | None) -> tuple[Values, str]:
    """(channels, height, width) bytes of an image in Pillow's `mode`, "L" or "RGB"; None: whatever suits the image."""
    from PIL import Image
    try:
        with Image.open(file) as image:
            mode = mode or ("L" if image.mode in ("1", "L", "I;16") else "RGB")
            pixels = np.asarray(image.convert(mode))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:      # Pillow raises each of these.
        raise DataError(f"cannot be decoded as an image: {' '.join(text_of(error).split())}", file=file) from None
    return (pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)), mode


def import_images(source: Path | str, out: Path | str, *, overwrite: bool = False) -> Path:
    """A folder with one sub-folder of images per class; all of one size, grey or RGB as the first image is.

    Classes are numbered in the order of their folders' names, and rows are shuffled by a fixed key, so that the tail of
    the set holds every class.
    """
    source, out = Path(source), Path(out)
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise ConfigError('reading images needs Pillow; install it: pip install "mpitrain[images]"') from None
    refuse_existing(out, overwrite)
    if not source.is_dir():
        raise MissingError("the folder of images by class is not there", file=source)
    folders = sorted(f for f in source.iterdir() if f.is_dir() and not f.name.startswith("."))
    found = [(file, c) for c, folder in enumerate(folders) for file in sorted(folder.iterdir())
             if file.suffix.lower() in SUFFIXES]
    if not found:
        raise DataError("no images in its sub-folders; expected FOLDER/class-name/image.png", file=source)
    order = permute(np.arange(len(found), dtype=np.int64), len(found), key("images"))
    files, labels = [found[i][0] for i in order], np.array([found[i][1] for i in order])
    pixels, mode = decode_image(files[0], None)
    return write_shards(out, ImageRows(files, pixels.shape, mode), labels.astype(np.min_scalar_type(len(folders))),
                        kind="classification", classes=[f.name for f in folders], overwrite=overwrite)
