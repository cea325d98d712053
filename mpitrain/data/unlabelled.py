"""Rows without targets, for a trained model: from HDF5, a folder of shards, NPZ, NPY or CSV.

The description has the form of `probe.describe`, with `kind` "rows" and y None, so a `Dataset` reads it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

from mpitrain.data.columns import Asked, inputs_of, named_as
from mpitrain.data.found import BUILT_IN, check_file, find_files
from mpitrain.data.manifest import MANIFEST, match_manifest
from mpitrain.data.probe import Parser, check_agreement, sample_file
from mpitrain.data.tables import TABLES, describe_table, has_array
from mpitrain.errors import DataError, MissingError

KIND = "rows"


def describe_rows(path: Path | str, x: Asked | None = None, started: Popen[bytes] | None = None, *,
                  default: Asked | None = None) -> dict[str, Any]:
    """What the rows of a data file or folder are; rank 0 calls it before MPI starts.

    `x` names the dataset of an HDF5 file, the array of an NPZ file, or columns of a CSV file, with commas between; or these for
    each input by its name. Without it the name is `default` in HDF5, and in NPZ that has it; else the only sensible choice is
    taken. `started` is what `files.parser.start_parser` gave, and is ended. Raises as `probe.describe`.
    """
    root = BUILT_IN.get(str(path)) or Path(path)
    table = TABLES.get(root.suffix.lower())
    if x is None and default is not None:
        x = default if table is None else in_table(root, default)
    with Parser(process=started) as parser:
        shards = [describe_table(root, x, table)] if table else _shards(root, x, parser)
    check_agreement(shards)
    description: dict[str, Any] = {"path": str(path), "host": socket.gethostname(), "x": named_as(shards[0]), "y": None,
                                   "kind": KIND, "shards": shards, "vocabulary": None, "classes": None}
    manifest = None if table else find_files(root)[1]
    if manifest is not None:
        if manifest["kind"] == "tokens":
            raise DataError("this is a text in one piece, to train on; give rows of tokens, integers of shape (rows, length), "
                            "or use evaluate", file=root)
        match_manifest(description, manifest, root / MANIFEST)
    for shard in shards:
        if not all("sha256" in shard[label] for label in inputs_of(shard)):
            shard["sample"], shard["sampled_among"] = sample_file(Path(shard["file"]), shard["size"], len(shards)), len(shards)
    return description


def in_table(path: Path, default: Asked) -> Asked | None:
    """The names of arrays in NPZ that `default` means, None where it has none of that name. DataError where inputs by name are
    not all there: each is the array of its own name, or of its dataset's."""
    if isinstance(default, str):
        return default if has_array(path, default) else None
    found = {name: next((word for word in (name, dataset.rpartition("/")[2], dataset) if has_array(path, word)), None)
             for name, dataset in default.items()}
    for name, word in found.items():
        if word is None:
            raise DataError(f'cannot tell which values are the input "{name}" of the model; say it for each input: '
                            f"{' '.join(f'--x {one}=NAME' for one in default)} (of CSV columns, commas between)", file=path)
    return {name: word for name, word in found.items() if word is not None}


def _shards(root: Path, x: Asked | None, parser: Parser) -> list[dict[str, Any]]:
    files, manifest = _named(lambda: find_files(root))
    x, shards = x or (manifest["x"] if manifest is not None else None), []
    for file in files:
        size, changed = check_file(file)
        name = x
        found = _named(lambda file=file, name=name: parser.ask(file, name, None))       # type: ignore[misc]
        x = named_as(found)
        shards.append({"file": str(file.absolute()), "size": size, "mtime_ns": changed, **found, "y": None})
    return shards


def _named(action: Callable[[], Any]) -> Any:
    """What `action()` gives; its errors advise what is said on the command line of a prediction."""
    try:
        return action()
    except (DataError, MissingError) as error:
        for key, word in (("data.x and data.y", "--x"), ("; set data.path", "; name another one"),
                          ("cannot tell inputs from targets among", "cannot tell which are the rows among")):
            error.args = (error.message.replace(key, word),)
        raise
