"""Other formats -> a folder of shards: text, IDX (MNIST), NPZ and NPY, CSV, series in .ts; images in `images`."""

from __future__ import annotations

import csv
import gzip
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.categories import CODES, NUMBERS, Asked, Known, coded, counts
from mpitrain.data.foreign import labels, read_series
from mpitrain.data.images import import_images
from mpitrain.data.packages import Packaged
from mpitrain.data.shards import Values
from mpitrain.data.storage import reading
from mpitrain.data.writing import refuse_existing, write_classification, write_shards
from mpitrain.errors import AccessError, ConfigError, DataError, MissingError, UsageError, text_of

__all__ = ["import_csv", "import_idx", "import_images", "import_npz", "import_text", "import_ts"]

GONE, DENIED = "the file to import is not there", "no permission to read the file to import"
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked where its name ends in .gz."""
    with reading(path, GONE, DENIED, "reading the file to import failed"):
        data = path.read_bytes()
    try:
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"is not a complete gzip file: {text_of(error)}", file=path) from None


def decoded(data: bytes, source: Path, cure: str = "") -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.object[error.start]:#04x} is not UTF-8{cure}", file=source, offset=error.start) from None


def import_text(source: Path | str, out: Path | str, *, level: str = "char", overwrite: bool = False) -> Path:
    """A text file as tokens: its characters numbered in code-point order (kept as the vocabulary), or its UTF-8 bytes."""
    source, out = Path(source), Path(out)
    if level not in ("char", "byte"):
        raise UsageError(f'level "{level}" is not one of char, byte')
    refuse_existing(out, overwrite)
    data = read_bytes(source)
    if not data:
        raise DataError("the text is empty", file=source)
    if level == "byte":
        vocabulary = [chr(b) if 32 <= b < 127 else f"\\x{b:02x}" for b in range(256)]
        return write_shards(out, np.frombuffer(data, np.uint8), kind="tokens", vocabulary=vocabulary, overwrite=overwrite)
    text = decoded(data, source, "; convert the text (iconv) or import it with --level byte")
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    known, tokens = np.unique(codes, return_inverse=True)
    numbers = tokens.astype(np.min_scalar_type(len(known) - 1))
    return write_shards(out, numbers, kind="tokens", vocabulary=[chr(c) for c in known], overwrite=overwrite)


def read_idx(path: Path) -> Values:
    """The array in an IDX file: two zero bytes, a type, the number of dims, big-endian sizes, values."""
    data = read_bytes(path)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in IDX_TYPES or not 1 <= data[3] <= 8:
        raise DataError(f"is not an IDX file (it starts with {data[:4].hex() or 'nothing'})", file=path, offset=0)
    start = 4 + 4 * data[3]
    shape = [int.from_bytes(data[i:i + 4], "big") for i in range(4, min(start, len(data)), 4)]
    dtype = np.dtype(IDX_TYPES[data[2]])
    needed = start + math.prod(shape) * dtype.itemsize
    if len(data) != needed or len(shape) != data[3]:
        raise DataError(f"declares {'x'.join(map(str, shape))} values, so {needed:,} bytes, but has {len(data):,}",
                        file=path, offset=min(len(data), needed))
    values = np.frombuffer(data, dtype, offset=start).reshape(shape)
    return values.astype(dtype.newbyteorder("="))


def import_idx(images: Path | str, out: Path | str, *, labels: Path | str | None = None, overwrite: bool = False) -> Path:
    """MNIST's format, gzipped or not: a folder with one pair of ``*images*`` and ``*labels*`` files, or the pair itself.

    Images of shape (n, height, width) are stored as (n, 1, height, width), ready for convolutions. Given the images
    file alone, the labels file beside it is found by its name.
    """
    images, out = Path(images), Path(out)
    refuse_existing(out, overwrite)
    if labels is None:
        images, labels = find_idx_pair(images)
    return write_classification(out, *read_idx_pair(images, Path(labels)), Path(labels), overwrite)


def read_idx_pair(images: Path, labels: Path) -> tuple[Values, Values]:
    """(x, y) of two IDX files; images of shape (n, height, width) get a channel."""
    x, y = read_idx(images), read_idx(labels)
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(f"labels are 1-D integers, but this file holds {y.dtype} values of shape {y.shape}", file=labels)
    return x[:, None] if x.ndim == 3 else x, y


def find_idx_pair(source: Path) -> tuple[Path, Path]:
    """(images file, labels file) of a folder, or of an images file whose labels file lies beside it."""
    if source.is_dir():
        found = [sorted(f for f in source.iterdir() if f"{what}-idx" in f.name) for what in ("images", "labels")]
        if [len(f) for f in found] != [1, 1]:
            raise DataError(f"expected one *images-idx* and one *labels-idx* file in the folder, found {len(found[0])} and "
                            f"{len(found[1])}; name the images file", file=source)
        return found[0][0], found[1][0]
    stem = source.name.removesuffix(".gz").replace("images-idx3", "labels-idx1")
    for name in (stem, stem + ".gz"):
        if name.removesuffix(".gz") != source.name.removesuffix(".gz") and (source.parent / name).exists():
            return source, source.parent / name
    if not source.exists():
        raise MissingError("the file or folder to import is not there", file=source)
    raise MissingError(f"no labels file {stem} beside it; name it with --labels", file=source)


def import_npz(source: Path | str, out: Path | str, *, targets: Path | str | None = None, x: str | None = None,
               y: str | None = None, overwrite: bool = False) -> Path:
    """An NPZ file with arrays `x` and `y` (or the names given), or an NPY file of inputs and one of `targets`.

    Integer 1-D targets are class labels, floats are regression targets, and a 1-D integer array without targets is
    tokens. Pickled objects are refused.
    """
    source, out = Path(source), Path(out)
    refuse_existing(out, overwrite)
    loaded = load_numpy(source)
    if isinstance(loaded, dict):
        x = x or ("x" if "x" in loaded or len(loaded) != 1 else next(iter(loaded)))
        y = y or ("y" if "y" in loaded else None)
        for name in (x, y):
            if name is not None and name not in loaded:
                raise DataError(f'no array "{name}" (there: {", ".join(sorted(loaded))}); name the arrays with --x and --y',
                                file=source, dataset=name)
        inputs, wanted = loaded[x], loaded[y] if y else None
    else:
        inputs, wanted = loaded, load_numpy(Path(targets)) if targets is not None else None
    if isinstance(wanted, dict):
        raise DataError("targets beside an NPY file come from another NPY file", file=targets)
    if inputs.ndim == 0:
        raise DataError("the inputs are a single number; expected rows along the first dim", file=source)
    if wanted is None:
        if inputs.ndim != 1 or inputs.dtype.kind not in "iu":
            raise DataError(f"there are no targets for inputs of shape {inputs.shape}; name them with --y (NPZ) or "
                            f"--targets (NPY)", file=source)
        return write_shards(out, inputs, kind="tokens", overwrite=overwrite)
    if wanted.dtype.kind in "biu" and wanted.ndim == 1:
        return write_classification(out, inputs, wanted.astype(np.int64), source, overwrite)
    if wanted.dtype.kind != "f":
        raise DataError(f"targets of dtype {wanted.dtype} and shape {wanted.shape} are neither labels (1-D integers) nor "
                        f"regression targets (floats)", file=source)
    return write_shards(out, inputs, wanted, kind="regression", overwrite=overwrite)


def load_numpy(path: Path, gone: str = GONE, denied: str = DENIED) -> Any:
    """An array, or a dict of arrays; pickles are never loaded."""
    try:
        with open(path, "rb") as file:                 # np.load leaves the file open when the archive is broken.
            loaded = np.load(file, allow_pickle=False)
            return loaded if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except FileNotFoundError:
        raise MissingError(gone, file=path) from None
    except PermissionError:
        raise AccessError(denied, file=path) from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, OSError) as error:
        said = ' '.join(text_of(error).split())
        if "pickle" in said:                              # so NumPy takes whatever it does not know
            said = "it is of another format, or holds Python objects, which are never loaded"
        raise DataError(f"cannot be read as NPZ or NPY: {said}", file=path) from None


def import_csv(source: Path | str, out: Path | str, *, label: str | int = -1, kind: str | None = None,
               categories: Sequence[str] = (), integers: Sequence[str] = (), by_name: bool = False,
               overwrite: bool = False) -> Path:
    """A table of numbers, with a header line or without; `label` is the target's column, by name or index (default: last).

    `kind` is "classification" or "regression"; unless given, targets that are all whole numbers written without a point,
    or words, are classes (words are numbered in sorted order, integers are taken as they are). Inputs become float32. The columns
    `categories` (of words) and `integers` become codes, which stand behind the numbers, or, `by_name`, are an input of their own:
    "numbers" and "codes". The manifest keeps the words.
    """
    source, out = Path(source), Path(out)
    refuse_existing(out, overwrite)
    lines = [line for line in csv.reader(decoded(read_bytes(source), source).splitlines()) if line]
    if not lines:
        raise DataError("the table is empty", file=source)
    column = _label_column(lines[0], label, source)
    header = any(not _is_number(cell) for i, cell in enumerate(lines[0]) if i != column)
    names = lines[0] if header else [str(i) for i in range(len(lines[0]))]
    body = lines[1:] if header or isinstance(label, str) and label in lines[0] else lines
    for row, cells in enumerate(body):
        if len(cells) != len(names):
            raise DataError(f"{len(cells)} columns, but the first line has {len(names)}", file=source, row=row)
    asked = Asked(categories, integers)
    codes, known = coded(body, names, asked, column, source, whole=by_name)
    plain = [i for i, name in enumerate(names) if i != column and name not in known]
    x = np.empty((len(body), len(plain)), np.float32)
    for row, cells in enumerate(body):
        for place, i in enumerate(plain):
            if not _is_number(cells[i]):
                raise DataError(f'"{cells[i]}" in column "{names[i]}" is not a finite number', file=source, row=row)
            x[row, place] = float(cells[i])
    table: Any = x if not known else np.concatenate([x, codes.astype(np.float32)], axis=1)
    if by_name:
        if not known:
            raise ConfigError("inputs by name are numbers and codes, and no column is among categories or integers", file=source)
        table = ({NUMBERS: x} if plain else {}) | {CODES: codes.astype(np.min_scalar_type(max(counts(known))))}
    return _write_table(out, table, [cells[column].strip() for cells in body], kind, source, overwrite, known or None)


def _label_column(first: list[str], label: str | int, source: Path) -> int:
    if isinstance(label, str) and label in first:
        return first.index(label)
    try:
        column = int(label)
    except ValueError:
        raise ConfigError(f'no column "{label}" (there: {", ".join(first[:20])})', file=source) from None
    if not -len(first) <= column < len(first):
        raise ConfigError(f"no column {column}: the first line has {len(first)}", file=source)
    return column % len(first)


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _write_table(out: Path, x: Any, targets: list[str], kind: str | None, source: Path, overwrite: bool,
                 known: Known | None) -> Path:
    numbers = all(map(_is_number, targets))
    whole = all(target.removeprefix("-").removeprefix("+").isdecimal() for target in targets)
    kind = kind or ("classification" if whole or not numbers else "regression")
    if kind == "regression":
        if not numbers:
            row = next(i for i, cell in enumerate(targets) if not _is_number(cell))
            raise DataError(f'the target "{targets[row]}" is not a finite number', file=source, row=row)
        return write_shards(out, x, np.array(targets, np.float32), kind="regression", categories=known, overwrite=overwrite)
    if kind != "classification":
        raise UsageError(f'kind "{kind}" is not one of classification, regression')
    if whole:
        return write_classification(out, x, np.array(targets, np.int64), source, overwrite, categories=known)
    classes = sorted(set(targets))
    number = {name: i for i, name in enumerate(classes)}
    return write_classification(out, x, np.array([number[t] for t in targets]), source, overwrite, classes, categories=known)


def import_ts(source: Path | str | Packaged, out: Path | str, *, classes: Mapping[str, str] | None = None,
              overwrite: bool = False) -> Path:
    """The UCR archive's .ts, univariate series of one length L with classes: float32 (n, L, 1) and labels.

    Classes are numbered in the order of the file's head. `classes` has other names for them, in an order of its own, by
    those of the file.
    """
    out = Path(out)
    refuse_existing(out, overwrite)
    file = source if isinstance(source, Packaged) else Packaged(Path(source), "correct the file")
    x, y, known = read_ts(file, classes)
    return write_shards(out, x, y, kind="classification", classes=known, overwrite=overwrite)


def read_ts(file: Packaged, classes: Mapping[str, str] | None = None) -> tuple[Values, Values, list[str]]:
    """Series (n, L, 1), their labels, and the names of the classes, as `import_ts` writes them."""
    series = read_series(file)
    known = list(classes or series.classes)
    return (series.values[:, :, None].astype(np.float32), labels(file, "class", series.names, known),
            list((classes or {}).values()) or known)
