"""safetensors: a header in JSON that says where each tensor lies, and then their bytes, without holes.

    8 bytes    N, the length of the header, little-endian
    N bytes    {"__metadata__": {word: word}, NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the rest   the tensors, little-endian, C order; offsets count from here

The format is Hugging Face's (github.com/huggingface/safetensors, format of 2022). A file is refused for what
their reader refuses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mpitrain.errors import DataError, nearest
from mpitrain.interchange.tensors import BFLOAT16, MOST_DIMS, Array, Stored, TensorFile, fits, mapped, publish, shown, stored

LONGEST_HEADER = 100_000_000                      # bytes, as in the reference
METADATA = "__metadata__"
DTYPES = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
          "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": BFLOAT16, "F32": "float32", "F64": "float64"}
WORDS = {name: word for word, name in DTYPES.items()}


def read(path: Path) -> TensorFile:
    """The tensors of a safetensors file, where they lie; the header is checked, and no tensor is read.

    DataError for anything the format forbids: a wrong header, a name twice, holes, overlaps, sizes that do not fit, other dtypes.
    """
    data = mapped(path)
    header, start = _header(path, data)
    words = header.pop(METADATA, {})
    if not isinstance(words, dict) or not all(isinstance(word, str) for word in words.values()):
        _refuse(path, f"{METADATA} must be a table of strings")
    body = data[start:]
    tensors, end = {}, 0
    for name, about in sorted(header.items(), key=lambda item: _offsets(path, *item)):
        dtype, shape, (first, stop) = _described(path, name, about)
        if first != end:
            _refuse(path, f"the tensor {shown(name)} begins at byte {first}, expected {end}: tensors follow each other without "
                          "holes or overlaps")
        end = stop
        if end > len(body):
            _refuse(path, f'the tensor {shown(name)} ends at byte {end}, and the file has {len(body)}: it is cut off')
        bits = np.frombuffer(body[first:stop], "u2" if dtype == BFLOAT16 else np.dtype(dtype).newbyteorder("<"))
        tensors[name] = Stored(bits.reshape(shape), dtype)
    if end != len(body):
        _refuse(path, f"the tensors end at byte {end}, and the file has {len(body)}: bytes that no tensor has")
    return TensorFile(path, tensors, words)


def _header(path: Path, data: Array) -> tuple[dict[str, Any], int]:
    """The header, and the place of the first byte behind it."""
    if len(data) < 8:
        _refuse(path, f"expected 8 bytes with the length of a header, found {len(data)}")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > LONGEST_HEADER or 8 + length > len(data):
        _refuse(path, f"the header has {length} bytes by its own words, and the file has {len(data)} (at most {LONGEST_HEADER} "
                      "are allowed); it is no safetensors file, or it is cut off")
    text = data[8:8 + length].tobytes()
    if text[:1] != b"{":
        _refuse(path, "expected a header in JSON that begins with {")
    try:
        found = json.loads(text.decode(), object_pairs_hook=lambda pairs: _table(path, pairs), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"the header is no JSON: {shown(str(error))}")
    assert isinstance(found, dict)
    return found, 8 + length


def _table(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            _refuse(path, f"the header has the name {shown(name)} twice")
        name.encode(), value.encode() if isinstance(value, str) else b""        # half a pair of UTF-16: a ValueError
        table[name] = value
    return table


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is none")


def _offsets(path: Path, name: str, about: Any) -> tuple[int, int]:
    found = about.get("data_offsets") if isinstance(about, dict) else None
    if not (isinstance(found, list) and len(found) == 2 and all(map(_is_size, found)) and found[0] <= found[1]):
        _refuse(path, f'{shown(name)} needs data_offsets [begin, end], found {shown(found)}')
    return found[0], found[1]


def _described(path: Path, name: str, about: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """The dtype, shape and place of a tensor."""
    first, stop = _offsets(path, name, about)
    word, shape = about.get("dtype"), about.get("shape")
    if not isinstance(word, str) or word not in DTYPES:
        _refuse(path, f'{shown(name)} has the dtype {shown(word)}{nearest(str(word)[:20], DTYPES)}')
    if not (isinstance(shape, list) and len(shape) <= MOST_DIMS and all(map(_is_size, shape))):
        _refuse(path, f'{shown(name)} has the shape {shown(shape)}, expected at most {MOST_DIMS} whole numbers')
    itemsize = 2 if DTYPES[word] == BFLOAT16 else np.dtype(DTYPES[word]).itemsize
    if (size := math.prod(shape) * itemsize) != stop - first:
        _refuse(path, f'{shown(name)} of shape {shape} and {word} takes {_number(size)} bytes, and has {stop - first}')
    if not fits(shape, itemsize):
        _refuse(path, f"{shown(name)} has the shape {shown(shape)}, which no array has")
    return DTYPES[word], tuple(shape), (first, stop)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _number(value: int) -> str:
    return str(value) if value < 1 << 63 else "more than 2^63"


def _refuse(path: Path, message: str) -> NoReturn:
    raise DataError(f"safetensors: {message}", file=path)


def write(path: Path, tensors: Mapping[str, Array | Stored], metadata: Mapping[str, str], *, overwrite: bool = False) -> None:
    """Makes a safetensors file of arrays, the widest dtypes first and then by name, so that each lies aligned."""
    given = {name: stored(tensor) for name, tensor in tensors.items()}
    order = sorted(given, key=lambda name: (-given[name].bits.dtype.itemsize, name))
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    chunks, end = [], 0
    for name in order:
        bits = given[name].bits
        array = np.asarray(bits, bits.dtype.newbyteorder("<"), order="C")
        header[name] = {"dtype": WORDS[given[name].dtype], "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
        chunks.append(array.reshape(-1).view(np.uint8).data if array.size else b"")
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    publish(path, [len(text).to_bytes(8, "little"), text, *chunks], overwrite=overwrite)
