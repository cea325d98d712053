"""The identity of a run's data: enough to tell, when the run goes on, whether its files are what they were.

Files with a manifest are told by its checksums. Of others, blocks spread over the file are hashed when they are examined, and
the places of their values are kept: a file that was written to anew, or whose header points elsewhere, is another file then.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.data.columns import inputs_of, labels_of
from mpitrain.data.names import kept_names

BLOCK, BLOCKS = 4096, 66          # The head of a file, its tail, and 64 blocks between them are hashed, ...
FEWEST, SPREAD = 4, 16 * BLOCKS   # ... of many files fewer blocks of each, so that a thousand cost what sixteen do.
WHOLE = 4                         # A file of at most so many times these bytes is read from end to end, which is as fast.
LISTED = 256                      # Of more files than these only the sum is kept.
FACTS = ("storage", "dtype", "shape", "chunk", "filters")


def sampled_sha256(fd: int, size: int, n_files: int = 1) -> str:
    """SHA-256 of blocks of an open file of `size` bytes, spread evenly from its head to its tail; OSError if it cannot be read.

    `n_files` is the number of files that are sampled together. It takes about a millisecond for one.
    """
    n = max(FEWEST, min(BLOCKS, SPREAD // n_files))
    total = hashlib.sha256(str(size).encode())
    whole = size <= WHOLE * n * BLOCK
    for start in range(0, size, BLOCK) if whole else [(size - BLOCK) * i // (n - 1) for i in range(n)]:
        total.update(os.pread(fd, BLOCK, start))
    return total.hexdigest()


def identity(description: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a described dataset (`probe.describe`) as plain JSON data; where its files lie is no part of it."""
    files = [_file(shard) for shard in description["shards"]]
    told = [{key: value for key, value in file.items() if key != "file"} for file in files]
    first = description["shards"][0]
    row = {label: {"shape": list(first[label]["shape"][1:]), "dtype": first[label]["dtype"]} for label in inputs_of(first)}
    found = {"x": description["x"], "y": description["y"], "sha256": _digest(told), "n_files": len(files),
             "row": row.get("x", row)}
    names = kept_names(description)
    return found | ({"names": names} if names else {}) | ({"files": files} if len(files) <= LISTED else {})


def _file(shard: Mapping[str, Any]) -> dict[str, Any]:
    fields = {label: shard[label] for label in labels_of(shard)}
    found: dict[str, Any] = {"file": Path(shard["file"]).name, "size": shard["size"]}
    if "sample" not in shard:                    # Checksums say more than places: values may lie anywhere.
        return found | {"content": _digest([[field["dtype"], field["shape"], field["sha256"]] for field in fields.values()])}
    for label, field in fields.items():
        facts = {key: field[key] for key in FACTS if key in field}
        if field["storage"] == "contiguous":
            facts["address"] = field["offset"]
        elif field["storage"] == "chunked":
            facts["addresses"] = _digest([field["offsets"], field["sizes"], field["masks"]])
        found[label] = facts
    return found | {"content": shard["sample"]}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()[:32]


def difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What is no longer the same, of the first file that differs; "" if nothing is."""
    for label in ("x", "y"):
        if was[label] != now[label]:
            return f'data.{label} was {_quoted(was[label])}, is {_quoted(now[label])}'
    if was["sha256"] == now["sha256"]:
        return ""
    if was["n_files"] != now["n_files"]:
        return f"there were {was['n_files']:,} files, there are {now['n_files']:,}"
    for before, after in zip(was.get("files", ()), now.get("files", ())):
        if found := _of_file(before, after):
            return f'{_quoted(after["file"])}: {found}'
    return f"one of {now['n_files']:,} files is another"


def _of_file(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if was["size"] != now["size"]:
        return f"{was['size']:,} bytes then, {now['size']:,} now"
    for label in dict.fromkeys([*labels_of(was), *labels_of(now)]):
        before, after = was.get(label) or {}, now.get(label) or {}
        for key in [*before, *(key for key in after if key not in before)]:
            if before.get(key) != after.get(key):
                return f"{key} of {label} was {_value(before.get(key))}, is {_value(after.get(key))}"
    if was["content"] != now["content"]:
        return f"its bytes are others (sha256 {was['content'][:8]}.. then, {now['content'][:8]}.. now)"
    return ""


def _value(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "x".join(map(str, value))
    return value[:8] if isinstance(value, str) else str(value)


def _quoted(name: str | Mapping[str, str] | None) -> str:
    return f'"{name}"' if isinstance(name, str) else "none" if name is None else ", ".join(f'{key} = "{one}"' for key, one in
                                                                                              name.items())
