"""Ways to damage a file, and files that are hostile by themselves, for damaged_files.py."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from data_inputs import features

from mpitrain.checkpoint import store
from mpitrain.checkpoint.parts import Piece
from mpitrain.data import write_shards
from mpitrain.files.signed import signed_text

Span = tuple[int, int]
EXTREME = (0, 1, 0xFF, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def bit(whole: bytes, values: Span, random_: random.Random) -> bytes:
    place = random_.randrange(len(whole))
    return whole[:place] + bytes([whole[place] ^ 1 << random_.randrange(8)]) + whole[place + 1:]


def bytes_16(whole: bytes, values: Span, random_: random.Random) -> bytes:
    place = random_.randrange(max(1, len(whole) - 16))
    return whole[:place] + random_.randbytes(16) + whole[place + 16:]


def metadata_byte(whole: bytes, values: Span, random_: random.Random) -> bytes:
    """A byte beside the values becomes another."""
    place = beside(whole, values, 1, random_)
    return whole[:place] + bytes([(whole[place] + random_.randrange(1, 256)) % 256]) + whole[place + 1:]


def field_of_8(whole: bytes, values: Span, random_: random.Random) -> bytes:
    """An aligned field of 8 bytes beside the values becomes extreme."""
    place = beside(whole, values, 8, random_)
    return whole[:place] + random_.choice((*EXTREME, len(whole))).to_bytes(8, "little") + whole[place + 8:]


def beside(whole: bytes, values: Span, size: int, random_: random.Random) -> int:
    while True:
        place = random_.randrange(len(whole) // size) * size
        if not values[0] <= place < values[1]:
            return place


def truncated(whole: bytes, values: Span, random_: random.Random) -> bytes:
    return whole[:random_.randrange(len(whole))]


def digits(whole: bytes, values: Span, random_: random.Random) -> bytes:
    """A digit becomes another: a manifest's numbers and sums; elsewhere a byte that happens to be one."""
    places = [place for place, byte in enumerate(whole) if 48 <= byte < 58]
    place = random_.choice(places or [0])
    return whole[:place] + bytes([48 + (whole[place] - 47) % 10]) + whole[place + 1:]


DAMAGE: dict[str, Callable[[bytes, Span, random.Random], bytes]] = {
    "bit": bit, "16 bytes": bytes_16, "metadata byte": metadata_byte, "8-byte field": field_of_8, "truncated": truncated,
    "digit": digits}


def change(whole: bytes, damaged: bytes) -> str:
    """What was damaged, for whoever wants to see it again."""
    first = next((i for i, (a, b) in enumerate(zip(whole, damaged)) if a != b), len(damaged))
    return f"at byte {first} of {len(whole)}: {whole[first:first + 16]!r} became {damaged[first:first + 16]!r}"


# -- bombs: each makes a file or folder and returns its path ----------------------------------------------------------------

def gzip_bomb(path: Path) -> Path:
    """264 KB that declare, and unpack to, 144 MiB."""
    columns = 36 << 20
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        file.create_dataset("x", (1, columns), "f4", chunks=(1, columns), compression="gzip", shuffle=True)[0] = 0
        file["y"] = np.arange(1)
    return path.with_suffix(".h5")


def many_datasets(path: Path) -> Path:
    with h5py.File(path.with_suffix(".h5"), "w", libver="latest") as file:
        space = h5py.h5s.create_simple((4,))
        for i in range(100_000):
            h5py.h5d.create(file.id, b"%d" % i, h5py.h5t.STD_I32LE, space)
    return path.with_suffix(".h5")


def deep_groups(path: Path) -> Path:
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        group = file.id
        for _ in range(20_000):
            group = h5py.h5g.create(group, b"g")
    return path.with_suffix(".h5")


def circle(path: Path) -> Path:
    """Groups that hold each other, and themselves, by hard links."""
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        a, b = file.create_group("a"), file.create_group("b")
        a["b"], b["a"], a["a"], b["root"] = b, a, a, file["/"]
    return path.with_suffix(".h5")


def many_chunks(path: Path) -> Path:
    """Chunks of one value; their table is much larger than the values."""
    with h5py.File(path.with_suffix(".h5"), "w", libver="latest") as file:
        file.create_dataset("x", data=features(100_000, 1), chunks=(1, 1))
        file["y"] = np.arange(100_000)
    return path.with_suffix(".h5")


def manifest_with(text: Callable[[str], str]) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        folder = write_shards(path, features(4, 2), np.arange(4), kind="classification")
        manifest = folder / "manifest.json"
        body = json.loads(manifest.read_text())
        del body["sha256"]
        manifest.write_text(text(json.dumps(body)))
        return folder
    return make


def checkpoint_with(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], Path]:
    """A checkpoint whose manifest was changed, and signed again."""
    def make(path: Path) -> Path:
        folder = store.save(path, 1, [Piece.whole("w", features(4, 2))], {})
        body = json.loads((folder / "manifest.json").read_text())
        del body["sha256"]
        change(body)
        (folder / "manifest.json").write_text(signed_text(body))
        return folder
    return make


def enlarge(body: dict[str, Any]) -> None:
    array = body["arrays"]["w"]
    array["shape"] = array["pieces"][0]["shape"] = [1 << 30, 1 << 15]


def overlap(body: dict[str, Any]) -> None:
    array = body["arrays"]["w"]
    array["shape"], array["pieces"] = [40_000, 2], array["pieces"] * 10_000


BOMBS: dict[str, Callable[[Path], Path]] = {
    "gzip bomb": gzip_bomb, "100,000 datasets": many_datasets, "deep groups": deep_groups, "circle of groups": circle,
    "small chunks, may be read": many_chunks,
    "deep JSON": manifest_with(lambda text: "[" * 1_000_000),
    "long JSON": manifest_with(lambda text: text.replace('"classes": null', '"classes": [' + '"", ' * 10_000_000 + '""]')),
    "small values in JSON": manifest_with(lambda text: text.replace('"classes": null', f'"more": [{"[]," * 20_000_000}[]]')),
    "256 MiB of JSON": manifest_with(lambda text: text + " " * (1 << 28)),
    "checkpoint of 32 TiB": checkpoint_with(enlarge), "one piece many times": checkpoint_with(overlap)}
