"""A model's predictions for the rows of a data set, in the file that `predict` wrote: for training another model on them.

The file says what it holds by its attributes (`ATTRIBUTES`). Row i is of row i of the data, which its "rows_sha256" tells.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.checks import check_finite
from mpitrain.data.columns import rows_of
from mpitrain.data.content import identity
from mpitrain.data.found import check_file
from mpitrain.data.probe import Parser, sample_file
from mpitrain.data.shards import Dataset, Rows, Values
from mpitrain.data.unlabelled import KIND
from mpitrain.errors import DataError

DATASET = "predictions"
ATTRIBUTES = ("run", "step", "as", "parameters_sha256", "rows_sha256")
LOGITS: dict[str, Callable[[Values], Values]] = {            # what is kept -> logits of the same probabilities
    "outputs": lambda values: values,
    "probabilities": lambda values: np.log(np.maximum(values, np.finfo(values.dtype).tiny))}


def rows_sha256(description: Mapping[str, Any]) -> str:
    """The identity of the inputs of a described data set, in their order; its targets, and where it lies, are no part of it."""
    shards = [{**shard, "y": None} for shard in description["shards"]]
    found: str = identity({**description, "y": None, "shards": shards})["sha256"]
    return found


def describe_predictions(path: Path, training: Mapping[str, Any], parser: Parser) -> dict[str, Any]:
    """The description of a file of predictions for the described `training` data, for a `Dataset`; "about" has its attributes.

    Rank 0 calls it before MPI starts. DataError where `predict` did not write it, or wrote it for other rows; MissingError.
    """
    if path.is_dir() or path.suffix.lower() in (".npz", ".csv"):
        what = "is a folder, and distil.teacher takes one" if path.is_dir() else "has no word on what was predicted"
        raise DataError(f"{what}; set distil.predictions to a file of predict --out FILE.h5", file=path)
    size, changed = check_file(path)
    found = parser.ask(path, DATASET, None, attributes=True)
    x, about = found["x"], found["attributes"]
    missing = [name for name in ATTRIBUTES if name not in about]
    if missing:
        raise DataError(f'expected a file that mpitrain predict wrote, and it has no attribute "{missing[0]}"; make one with '
                        "predict --out FILE.h5", file=path)
    if about["as"] not in LOGITS or np.dtype(x["dtype"]).kind != "f":
        raise DataError(f'holds "{about["as"]}" ({np.dtype(x["dtype"])}), and a teacher gives {" or ".join(LOGITS)}; predict '
                        "anew without --as", file=path, dataset=x["name"])
    if training["kind"] != "classification":
        raise DataError(f"predictions are for data with labels, a row each, and these data are for {training['kind']}; set "
                        "distil.teacher to the run, in place of distil.predictions", file=path)
    rows = sum(map(rows_of, training["shards"]))
    again = f"predict them anew, for {training['path']}"
    if x["shape"][0] != rows:
        raise DataError(f"has {x['shape'][0]:,} rows, and data.path has {rows:,}; {again}", file=path, dataset=x["name"])
    if about["rows_sha256"] != (wanted := rows_sha256(training)):
        raise DataError(f"the rows that were predicted are not those of data.path, or not in this order: sha256 "
                        f"{about['rows_sha256'][:8]}.. then, {wanted[:8]}.. now; {again}", file=path)
    shard = {"file": str(path.absolute()), "size": size, "mtime_ns": changed, "x": x, "y": None,
             "sample": sample_file(path, size, 1), "sampled_among": 1}
    return {"path": str(path), "host": socket.gethostname(), "x": x["name"], "y": None, "kind": KIND, "shards": [shard],
            "vocabulary": None, "classes": None, "about": about}


class Predictions:
    """Logits (rows, ..., C) of the rows of a data set, by their numbers."""

    def __init__(self, description: dict[str, Any]):
        self.source = Dataset(description)
        self.logits = LOGITS[description["about"]["as"]]
        self.path = self.source.shards[0]["file"]
        self.shape: tuple[int, ...] = tuple(self.source.x.shape)        # of a row

    def read(self, rows: Rows) -> Values:
        """DataError at the first row that is not finite."""
        field = self.source.x
        values = self.source.read_field(field, rows)
        check_finite(values, rows, self.source, field.name)
        found: Values = self.logits(values)
        return found
