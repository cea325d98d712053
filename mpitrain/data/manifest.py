"""manifest.json: what a folder of shards promises about its files, so that damage and mix-ups are seen before use.

    {"format": "mpitrain shards", "version": 1, "kind": "classification", "x": "/x", "y": "/y", "block": 1048576,
     "classes": ["cat", "dog"], "vocabulary": null,
     "shards": [{"file": "shard-00000.h5", "size": 2048, "x": {"dtype": "|u1", "shape": [9, 8], "sha256": ["01ab..", ...]}, ...}],
     "sha256": "9f2c.."}

With inputs by name "x" is a table, {"tokens": "/x.tokens", ...}, and a shard has an entry "x.tokens" for each (version 2).
There is one SHA-256 for each `block` bytes of a contiguous dataset's values as they lie in the file (the last may be
shorter), or for each stored chunk, in C order of the chunk grid, of a chunked one. That of the manifest itself may be
left out.
"""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from mpitrain.data.columns import Asked, labelled, labels_of
from mpitrain.errors import DataError, MissingError
from mpitrain.files.signed import body_sha256, parse

MANIFEST = "manifest.json"
FORMAT = "mpitrain shards"
VERSION, NAMED = 1, 2            # of a manifest with inputs by name, which older versions of ours do not read
BLOCK = 1 << 20
MAX_BYTES = 1 << 28
KINDS = ("classification", "regression", "tokens", "series")
SHARD_KEYS: dict[str, type] = {"file": str, "size": int}


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest at `path`, every field checked; it may come from anyone. Raises DataError, MissingError for a shard."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise DataError(f"the manifest has {size:,} bytes; at most {MAX_BYTES:,} are read", file=path)
    try:
        manifest = parse(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"the manifest is not JSON: {error}", file=path) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f'this is not a manifest of {FORMAT} ("format": "{FORMAT}" is missing)', file=path)
    known = NAMED if isinstance(manifest.get("x"), dict) else VERSION
    if manifest.get("version") != known:
        raise DataError(f"schema version {manifest.get('version')!r}; this mpitrain reads version {known}: import the data again",
                        file=path)
    body = {name: value for name, value in manifest.items() if name != "sha256"}
    try:
        right = "sha256" not in manifest or manifest["sha256"] == body_sha256(body)
    except (ValueError, RecursionError):                     # NaN and infinity, which Python reads, and no hash is made of
        right = False
    _require(right, 'its own sha256 does not match; if it was changed on purpose, take out the line "sha256"', path)
    _require(manifest.get("kind") in KINDS, f"kind is {manifest.get('kind')!r}, not one of {', '.join(KINDS)}", path)
    x = manifest.get("x")
    names = list(x.values()) if isinstance(x, dict) else [x]
    _require(bool(names) and all(isinstance(name, str) for name in names), '"x" must name a dataset, or one for each input', path)
    _require(manifest.get("y") is None or isinstance(manifest["y"], str), '"y" must name a dataset or be null', path)
    block = manifest.get("block")
    _require(type(block) is int and 1 <= block <= 1 << 30, f"block is {block!r}, not a number of bytes", path)
    for name in ("classes", "vocabulary"):
        words = manifest.get(name)
        _require(words is None or isinstance(words, list) and all(isinstance(w, str) for w in words),
                 f"{name} must be a list of strings or null", path)
    known = manifest.get("categories", {})
    _require(isinstance(known, dict) and all(type(one) is int and one > 0 or isinstance(one, list) and bool(one)
                                             and all(isinstance(w, str) for w in one) for one in known.values()),
             "categories must be a table of lists of words, or of numbers", path)
    shards = manifest.get("shards")
    _require(isinstance(shards, list) and bool(shards), "shards must be a list with at least one entry", path)
    assert isinstance(shards, list)
    for shard in shards:
        _check_shard(shard, list(labelled(manifest["x"], manifest["y"])), path)
    names = [shard["file"] for shard in shards]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f'the manifest lists the shard "{twice}" twice, so its rows would count twice; remove one', file=path)
    return manifest


def _require(condition: bool, message: str, path: Path) -> None:
    if not condition:
        raise DataError(f"the manifest is damaged: {message}", file=path)


def version_of(x: Asked) -> int:
    """The version of a manifest with these inputs."""
    return VERSION if isinstance(x, str) else NAMED


def _check_shard(shard: Any, labels: list[str], path: Path) -> None:
    wanted = SHARD_KEYS | {label: dict for label in labels if label != "y"}
    _require(isinstance(shard, dict) and all(isinstance(shard.get(key), kind) for key, kind in wanted.items()),
             f"a shard needs {', '.join(wanted)}", path)
    name = shard["file"]
    plain = PurePosixPath(name).name == name and name not in ("", ".", "..") and name.isprintable()
    _require(plain, f"shard {name!r} must be a plain file name in the manifest's folder", path)
    if not os.path.lexists(path.parent / name):
        raise MissingError(f'shard "{name}" of the manifest is not there', file=path.parent / name)
    _require(not (path.parent / name).is_symlink(), f'shard "{name}" is a symbolic link', path)
    _require((shard.get("y") is not None) == ("y" in labels), f'"y" of shard "{name}" and of the whole set disagree', path)
    for label in labels:
        dataset = shard.get(label)
        sums = dataset.get("sha256") if isinstance(dataset, dict) else None
        _require(isinstance(sums, list) and all(isinstance(s, str) and len(s) == 64 for s in sums),
                 f'"{label}" of shard "{name}" has no list of SHA-256 sums', path)


def match_manifest(description: dict[str, Any], manifest: dict[str, Any], path: Path) -> None:
    """Compare what the files hold with what the manifest promises, then take its kind, names and checksums over."""
    for shard, promised in zip(description["shards"], manifest["shards"]):
        file = shard["file"]
        if shard["size"] != promised["size"]:
            raise DataError(f"has {shard['size']:,} bytes, but the manifest says {promised['size']:,}; it is truncated or of "
                            f"another set", file=file, offset=min(shard["size"], promised["size"]))
        listed = labelled(manifest["x"], manifest["y"])
        for label in labels_of(shard):
            found = shard[label]
            if found["name"] != listed.get(label):
                continue                              # The manifest does not mention this dataset.
            for field in ("dtype", "shape"):
                if found[field] != promised[label].get(field):
                    raise DataError(f"{field} {found[field]}, but the manifest says {promised[label].get(field)}",
                                    file=file, dataset=found["name"])
            found["sha256"] = promised[label]["sha256"]
            found["block"] = manifest["block"]
            expected = n_blocks(found)
            if len(found["sha256"]) != expected:
                raise DataError(f"the manifest holds {len(found['sha256'])} checksums for {expected} blocks",
                                file=path, dataset=found["name"])
    if "categories" in manifest and description["x"] == manifest["x"]:
        description["categories"] = manifest["categories"]
    if (description["x"], description["y"]) != (manifest["x"], manifest["y"]):
        return
    kind, found_kind = manifest["kind"], description["kind"]
    if kind != found_kind:
        raise DataError(f'kind is "{kind}", but the shapes and dtypes of the shards are those of {found_kind}', file=path)
    description["classes"], description["vocabulary"] = manifest.get("classes"), manifest.get("vocabulary")


def n_blocks(dataset: dict[str, Any]) -> int:
    """How many checksums a described dataset needs."""
    if dataset["storage"] == "chunked":
        return len(dataset["offsets"])
    n_bytes: int = math.prod(dataset["shape"]) * np.dtype(dataset["dtype"]).itemsize
    block: int = dataset["block"]
    return -(-n_bytes // block)
