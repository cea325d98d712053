"""PyTorch's .pt files of a state_dict, read and written without PyTorch: a zip archive of one pickle and the tensors' bytes.

    NAME/data.pkl    the pickle: names, shapes, strides, and which storage a tensor lies in (`pickles.py` reads it)
    NAME/data/0      the bytes of storage 0, and so on; several tensors may lie in one
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mpitrain.errors import DataError
from mpitrain.interchange import pickles
from mpitrain.interchange.exporting import Tell, Wanted, named
from mpitrain.interchange.pickles import Described, PickleError
from mpitrain.interchange.tensors import BFLOAT16, Array, Stored, TensorFile, fits, mapped, publish, shown, stored
from mpitrain.train.build.saved import SavedModel

LOCAL = struct.Struct("<4s5H3I2H")                # the header before a file of an archive; names of its fields: APPNOTE.TXT 4.3.7
LARGEST_PICKLE = 256 << 20                        # bytes; GPT-2's has 60 kB
WHERE = ("model", "state_dict", "model_state_dict", "module")     # keys under which training programs keep the state_dict


def read(path: Path) -> TensorFile:
    """The tensors of a .pt file, mapped: of a state_dict, or of a checkpoint that has one under one of WHERE.

    DataError where the archive is damaged or has compressed parts, or its pickle asks for more than tensors in containers;
    nothing of a file is ever run.
    """
    data = mapped(path)
    if data[:1].tobytes() == b"\x80":
        _refuse(path, "it is a bare pickle, PyTorch's format of before 1.6, or no file of torch.save at all; load and save it "
                      "with a newer PyTorch")
    files = _archive(path, data)
    name = next((name for name in files if name.endswith("/data.pkl") and name.count("/") == 1), None)
    if name is None:
        _refuse(path, "the archive has no data.pkl; it is no file of torch.save(model.state_dict(), FILE)")
    root = name.removesuffix("data.pkl")
    if files.get(f"{root}byteorder", np.zeros(0, np.uint8)).tobytes() not in (b"", b"little"):
        _refuse(path, "its numbers are big-endian; save it on another machine")
    if len(files[name]) > LARGEST_PICKLE:
        _refuse(path, f"its pickle has {len(files[name])} bytes, more than {LARGEST_PICKLE}")
    try:
        found = pickles.load(files[name].tobytes())
    except PickleError as error:
        _refuse(path, f"the pickle in it: {error}")
    table, rest = _state_dict(path, found)
    return TensorFile(path, {key: _stored(path, key, value, files, root) for key, value in table.items()}, rest)


def _archive(path: Path, data: Array) -> dict[str, Array]:
    """The files of an archive, where they lie. Each is stored as it is: what is compressed could be of any size."""
    try:
        with zipfile.ZipFile(io.BufferedReader(_Mapped(data))) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, struct.error, NotImplementedError, OverflowError) as error:
        _refuse(path, f"the archive is damaged or cut off: {shown(str(error))}")
    files: dict[str, Array] = {}
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.file_size != entry.compress_size:
            _refuse(path, f"{shown(entry.filename)} in it is compressed or encrypted, which torch.save never does")
        start = entry.header_offset
        if not 0 <= start <= len(data) - LOCAL.size or data[start:start + 4].tobytes() != b"PK\x03\x04":
            _refuse(path, f"{shown(entry.filename)} in it is not where the archive says")
        *_, name, extra = LOCAL.unpack(data[start:start + LOCAL.size].tobytes())
        start += LOCAL.size + name + extra
        if start + entry.file_size > len(data):
            _refuse(path, f"{shown(entry.filename)} in it is cut off")
        found = data[start:start + entry.file_size]
        if entry.filename in files:
            _refuse(path, f"{shown(entry.filename)} is in it twice")
        files[entry.filename] = found
        if zlib.crc32(np.ascontiguousarray(found).data) != entry.CRC:
            _refuse(path, f"{shown(entry.filename)} in it is damaged: its checksum is another one")
    return files


class _Mapped(io.RawIOBase):
    """A mapped file as `zipfile` wants it; no byte is copied that is not asked for."""

    def __init__(self, data: Array):
        self.data, self.place = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = self.data[self.place:self.place + len(buffer)]
        buffer[:len(found)] = found.data
        self.place += len(found)
        return len(found)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: len(self.data)}[whence]
        if self.place < 0:
            raise ValueError("a place before the beginning")
        return self.place


def _state_dict(path: Path, found: Any) -> tuple[dict[str, Described], dict[str, Any]]:
    """The table of tensors in what a file has, and the plain values beside it."""
    if not isinstance(found, dict):
        _refuse(path, f"expected a table of tensors, found a {type(found).__name__}")
    inner = next((key for key in WHERE if isinstance(found.get(key), dict)), None)
    table = found if inner is None else found[inner]
    tensors = {key: value for key, value in table.items() if isinstance(value, Described)}
    if not tensors or not all(isinstance(key, str) for key in tensors):
        names = ", ".join(shown(key) for key in list(found)[:8])
        _refuse(path, f"there is no table of tensors in it, nor under {', '.join(WHERE)}; it has {names or 'nothing'}")
    if others := [key for key in table if key not in tensors] if inner is not None else []:
        _refuse(path, f"{shown(others[0])} in the state_dict is no tensor")
    return tensors, {key: value for key, value in found.items() if isinstance(key, str) and key not in tensors and key != inner}


def _stored(path: Path, key: str, tensor: Described, files: Mapping[str, Array], root: str) -> Stored:
    """A tensor's numbers where they lie."""
    storage = tensor.storage
    data = files.get(f"{root}data/{storage.key}")
    itemsize = 2 if storage.dtype == BFLOAT16 else np.dtype(storage.dtype).itemsize
    if data is None or storage.size * itemsize != len(data):
        _refuse(path, f"{shown(key)} lies in storage {shown(storage.key)} of {storage.size} {storage.dtype}, and there are "
                      f"{'none' if data is None else f'{len(data)} bytes'}")
    sizes = (tensor.offset, *tensor.shape, *tensor.strides)
    last = tensor.offset + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides))
    empty = 0 in tensor.shape
    if any(not 0 <= n < 1 << 62 for n in sizes) or not fits(tensor.shape, itemsize) or math.prod(tensor.shape) > storage.size or (
            not empty and last >= storage.size):
        _refuse(path, f"{shown(key)} of shape {shown(tensor.shape)}, strides {shown(tensor.strides)} from "
                      f"{shown(tensor.offset)} on reaches beyond its storage of {storage.size}")
    numbers = np.frombuffer(data, "u2" if storage.dtype == BFLOAT16 else storage.dtype)
    if empty:
        return Stored(np.zeros(tensor.shape, numbers.dtype), storage.dtype)
    strides = tuple(stride * itemsize for stride in tensor.strides)
    return Stored(as_strided(numbers[tensor.offset:], tensor.shape, strides, writeable=False), storage.dtype)


def _refuse(path: Path, message: str) -> NoReturn:
    raise DataError(f".pt: {message}", file=path)


# ---- writing ---------------------------------------------------------------------------------------------------------

def export_pt(saved: SavedModel, wanted: Wanted, tell: Tell) -> None:
    """The state_dict that `torch.load(FILE)` gives and `load_state_dict` takes; a tied one is one storage with two names."""
    arrays, aliases, names = named(saved, wanted, "pytorch", tell)
    write(wanted.path, arrays, aliases, overwrite=wanted.overwrite)
    tell(f"{wanted.path}: {len(arrays) + len(aliases)} names of {len(arrays)} tensors, "
         f"{sum(array.nbytes for array in arrays.values()):,} bytes, names {names}")


def write(path: Path, arrays: Mapping[str, Array | Stored], aliases: Mapping[str, str], *, overwrite: bool = False) -> None:
    """Makes a .pt file of arrays; `aliases` are further names of some of them. Equal arrays make equal bytes."""
    given, order = {name: stored(array) for name, array in arrays.items()}, list(arrays)
    pickle = _pickle([(name, given[name], order.index(name)) for name in order] + [
        (name, given[first], order.index(first)) for name, first in aliases.items()])
    files: dict[str, Any] = {"data.pkl": pickle, "byteorder": b"little"}
    for number, name in enumerate(order):
        bits = given[name].bits
        array = np.asarray(bits, bits.dtype.newbyteorder("<"), order="C")
        files[f"data/{number}"] = array.reshape(-1).view(np.uint8).data if array.size else b""
    files["version"] = b"3\n"
    publish(path, _zipped(f"{path.stem or 'archive'}/", files), overwrite=overwrite)


def _pickle(tensors: list[tuple[str, Stored, int]]) -> bytes:
    """A dict of tensors in the pickle language, protocol 2, as torch.save writes it."""
    out = [b"\x80\x02}("]
    words = {kind: word for word, kind in pickles.STORAGES.items()}
    for name, array, number in tensors:
        strides = np.zeros(array.shape, "i1").strides
        storage = _call("torch", words[array.dtype])
        out += [_word(name), b"ctorch._utils\n_rebuild_tensor_v2\n(", b"(" + _word("storage"), storage, _word(str(number)),
                _word("cpu"), _number(array.bits.size), b"tQ", _number(0), _tuple(array.shape), _tuple(strides), b"\x89",
                b"ccollections\nOrderedDict\n)R", b"tR"]
    return b"".join([*out, b"u."])


def _call(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _word(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def _tuple(values: Any) -> bytes:
    return b"(" + b"".join(_number(int(value)) for value in values) + b"t"


def _zipped(root: str, files: Mapping[str, Any]) -> list[bytes | memoryview]:
    """The chunks of an archive; the tensors' bytes are not copied."""
    chunks: list[bytes | memoryview] = []
    central, place = [], 0
    for name, data in files.items():
        path, size, crc = (root + name).encode(), len(data), zlib.crc32(data)
        big = struct.pack("<HHQQ", 1, 16, size, size) if size >= 1 << 32 else b""
        shown_size = 0xFFFFFFFF if big else size
        gap = -(place + LOCAL.size + len(path) + len(big) + 4) % 64          # tensors begin at multiples of 64, as PyTorch's do
        extra = big + struct.pack("<HH", 0x4246, gap) + b"Z" * gap
        head = LOCAL.pack(b"PK\x03\x04", 45, 0x800, 0, 0, 0x21, crc, shown_size, shown_size, len(path), len(extra))
        far = struct.pack("<HHQQQ", 1, 24, size, size, place) if big else b""
        if not big and place >= 1 << 32:
            far = struct.pack("<HHQ", 1, 8, place)
        central.append(struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 45, 45, 0x800, 0, 0, 0x21, crc, shown_size, shown_size,
                                   len(path), len(far), 0, 0, 0, 0, 0xFFFFFFFF if far else place) + path + far)
        chunks += [head + path + extra, data]
        place += LOCAL.size + len(path) + len(extra) + size
    tail = b"".join(central)
    end = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, len(files), len(files), len(tail), place)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, place + len(tail), 1)
    last = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, min(len(files), 0xFFFF), min(len(files), 0xFFFF),
                       min(len(tail), 0xFFFFFFFF), min(place, 0xFFFFFFFF), 0)
    return [*chunks, tail, end, locator, last]
