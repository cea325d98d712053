"""The outputs of a trained model for the rows of a file, on any number of ranks and any mesh.

Rows are cut into chunks of a fixed size, chunk c goes to place c mod n, and each output is written to the place of its row: no
row is padded, repeated or left out, and the file has the same bytes on any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.backend import NO_CLASS, array_module
from mpitrain.comm.job import guard
from mpitrain.comm.job.together import on_first
from mpitrain.config import Config
from mpitrain.data import Dataset
from mpitrain.data.checks import check_exact
from mpitrain.data.columns import Columns, inputs_of
from mpitrain.data.predictions import rows_sha256
from mpitrain.data.series import SeriesWindows
from mpitrain.data.shards import Fields
from mpitrain.errors import OutputError, print_warning
from mpitrain.infer import output
from mpitrain.infer.forms import CLASSES, Form, form, undone
from mpitrain.infer.recorded import ByRows, Recorded
from mpitrain.infer.rows import chunk_rows, refuse_rows, trained_on
from mpitrain.placement import zigzag
from mpitrain.run.evaluating import InUse
from mpitrain.run.resuming import readable
from mpitrain.run.saved_run import SavedRun
from mpitrain.train.build.experiment import refuse_other_names_than
from mpitrain.train.build.from_config import make_loss
from mpitrain.train.build.names import refuse_names
from mpitrain.train.build.trial import outputs_of


@dataclass(frozen=True)
class Predicted:
    """What a prediction has done, equal on all ranks; the counts are of rows with NaN or infinite values."""

    step: int
    shape: tuple[int, ...]
    dtype: str
    sha256: str
    nonfinite_inputs: int
    nonfinite_outputs: int


class Reader:
    """Rows as the model sees them, chunk by chunk, and how many of a chunk hold NaN or infinite values."""

    def __init__(self, used: InUse, config: Config):
        source = used.inputs.training
        assert isinstance(source, Dataset | SeriesWindows)
        self.source: Any = source
        self.transforms, self.n, field = used.inputs.transforms, len(source), self.source.x
        self.tokens, self.dtype = used.inputs.tokens, used.policy.layout.dtype
        if not isinstance(field, Fields):
            refuse_rows(field.shape, field.dtype, self.tokens, file=source.where(0)[0], dataset=field.name)
        self.dataset = "" if isinstance(field, Fields) else field.name
        self.size, self.trained = chunk_rows(field.shape, self.tokens), trained_on(used.found.meta, config)
        self.nonfinite: dict[int, int] = {}

    def rows(self, start: int, stop: int) -> tuple[Any, int]:
        rows = np.arange(start, min(stop, self.n), dtype=np.int64)
        x = self.source.read_field(self.source.x, rows)
        if self.tokens:
            self.trained.refuse_tokens(x, lambda row: self.place(start + row))
        if isinstance(x, Columns):
            x = self.trained.alike(x, lambda name, row: self.place(start + row, self.source.x.name[name]))
            return self.transforms(x), int(np.maximum.reduce([not_finite(values) for values in x.values.values()]).sum())
        given = self.transforms(x)
        if not self.tokens:
            check_exact(given, rows, self.source, self.source.x.name, self.dtype)
        return given, int(not_finite(x).sum())

    def place(self, row: int, dataset: str = "") -> dict[str, Any]:
        """The words of an error for where a row is."""
        file, row = self.source.where(row)
        return {"file": file, "dataset": dataset or self.dataset, "row": row}

    def chunk(self, number: int) -> tuple[Any, int]:
        x, self.nonfinite[number] = self.rows(number * self.size, (number + 1) * self.size)
        return x, number


def not_finite(values: Any) -> Any:
    """Which rows hold NaN or infinity, as 0.0 and 1.0. A finite sum proves that none does, which costs one pass."""
    if values.dtype.kind != "f" or np.isfinite(values.sum(dtype=np.float64)):
        return np.zeros(len(values))
    return (~np.isfinite(values.reshape(len(values), -1)).all(axis=1)).astype(np.float64)


class Outputs:
    """Outputs as this rank has them -> the rows, or the parts of rows, that it writes."""

    def __init__(self, used: InUse, kept: Form):
        self.context, self.placement, self.form = used.context, used.placement, kept
        self.cp, self.along = self.placement.grid.size("cp"), self.placement.grid.coordinate("cp")
        self.others = self.context.mesh.channel("cp", "predictions") if self.cp > 1 else None

    def kept(self, found: Tensor) -> Any:
        """What is kept of an output; ranks that share a layer call it alike."""
        array, group, head = found.array, self.context.group, self.placement.head
        if head is None or group is None:
            return self.form.made(array)
        if head.outputs % group.size == 0:
            return self.form.made(group.gather(array, -1, "outputs"))
        whole = array_module(array).zeros((*array.shape[:-1], head.outputs), array.dtype)      # parts are not of one shape
        whole[..., head.first:head.first + array.shape[-1]] = array
        return self.form.made(group.sum(whole, "outputs"))

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of all ranks' positions together."""
        return shape if self.cp == 1 else (shape[0], shape[1] * self.cp, *shape[2:])

    def n_nonfinite(self, values: Any) -> int:
        """The rows that are not finite, at any rank's positions."""
        found = not_finite(values)
        if self.form.name == CLASSES:
            found = (values.reshape(len(values), -1) == NO_CLASS).any(axis=1).astype(np.float64)
        if self.others is not None:
            self.others.allreduce(found, name="rows that are not finite")
        return int(np.count_nonzero(found))

    def pieces(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """The (start, length) of this rank's positions in a row of the file's `shape`; nothing where it has all of them."""
        if self.cp == 1:
            return []
        size = shape[1] // (2 * self.cp)
        return [(chunk * size, size) for chunk in zigzag.chunks(self.along, self.cp)]


def predict(run: SavedRun, source: Path, out: Path, *, step: int | str | None = None, keep: str = "outputs",
            inverse: bool = False, resume: bool = False) -> Predicted:
    """Writes the outputs of a checkpoint of the run in `source` for the data that `run` was given, in the order of their rows.

    `keep` is "outputs", "classes" or "probabilities"; with `inverse` outputs have the units of the targets. All ranks call it,
    and it communicates. Raises OutputError where `out` may not be written, MissingError and CheckpointError about the checkpoint,
    ShapeError where the model cannot take the rows.
    """
    with run.use(source, step) as used:
        control = used.context.control
        with guard.symmetric():
            reader = Reader(used, run.config)
            _refuse_other_codes(used, reader)
            _tell_kind(reader, control.rank)
            whole = not used.policy.cuts_parameters and all(used.context.mesh.size(axis) == 1 for axis in ("tp", "cp", "ep"))
            used.inference.forwards = [Recorded(chunk) if whole else ByRows(chunk) for chunk in used.context.stage.chunks]
            outputs = Outputs(used, form(keep, make_loss(run.config, used.inputs.tokens),
                                         undone(used.inputs.transforms) if inverse else None))
        shape, dtype = _first(used, reader, outputs)
        identity = _identity(run, used, reader, [keep, inverse, *shape, dtype])
        rows = output.Rows(out, (reader.n, *shape), dtype, reader.size, identity,
                           {"run": str(used.found.meta.get("id", "")), "step": str(used.found.step), "as": keep,
                            "parameters_sha256": used.found.hashes.get("parameters_sha256", ""),
                            "rows_sha256": rows_sha256(reader.source.description)}, outputs.cp)
        start, done = on_first(control, lambda: output.begin(rows, resume=resume))
        table = _run(used, reader, outputs, rows, start, done)
        control.allreduce(table.reshape(-1), name="chunks that are written")
        wrong = np.flatnonzero(table[:, 0] != 1)
        with guard.symmetric():
            if wrong.size:
                raise OutputError(f"chunk {wrong[0]} was written {table[wrong[0], 0]:.0f} times, not once; this is a mistake of "
                                  "mpitrain", file=rows.part)
        sha256 = on_first(control, lambda: output.finish(rows, start))
        return Predicted(used.found.step, rows.shape, dtype, sha256, int(table[:, 1].sum()), int(table[:, 2].sum()))


def _first(used: InUse, reader: Reader, outputs: Outputs) -> tuple[list[int], str]:
    """The shape and dtype of what is kept for a row, on all ranks: of the first row, which the model is tried on."""
    with guard.symmetric():
        field, file, taken = reader.source.x, reader.source.where(0)[0], reader.trained.taken
        x, _ = taken(lambda: reader.rows(0, 1), field.shape, file=file, dataset=reader.dataset)
        refuse_names(used.context.stage.whole, x)
        used.placement.refuse_samples(x, x)
        found = taken(lambda: [outputs.kept(one) for one in outputs_of(used.inference, x, x, file)], field.shape, file=file,
                      dataset=reader.dataset)
    told = [[list(outputs.whole(one.shape)[1:]), one.dtype.newbyteorder("<").str] for one in found]
    everyone = used.context.control.gather_objects(told)
    shape, dtype = next(told[0] for told in everyone if told)
    return shape, dtype


def _refuse_other_codes(used: InUse, reader: Reader) -> None:
    """DataError where the rows' codes stand for other categories than in training; targets are not looked at."""
    was = used.found.meta.get("experiment")
    if was is not None:
        with readable(used.found):
            refuse_other_names_than(was, {"training": reader.source.description}, ("categories",))


def _tell_kind(reader: Reader, rank: int) -> None:
    """A warning of floats where the training rows were integers, or the other way. CSV has no dtype of its own."""
    if isinstance(reader.source.x, Fields):
        return
    text = reader.trained.other_kind(reader.source.x.dtype)
    if text and rank == 0 and Path(reader.source.where(0)[0]).suffix.lower() != ".csv":
        print_warning(text)


def _identity(run: SavedRun, used: InUse, reader: Reader, kept: list[Any]) -> str:
    """A hash of all that the output depends on; a part file with another one is not gone on with."""
    shards = [[shard["size"], shard["mtime_ns"], *(shard[label][key] for label in inputs_of(shard)
                                                   for key in ("name", "shape", "dtype"))] for shard in reader.source.shards]
    known = [used.found.meta.get("id"), used.found.step, used.found.hashes, shards, run.config.data.transform, reader.size, kept,
             run.config.train.precision]
    return hashlib.sha256(json.dumps(known, default=str).encode()).hexdigest()


def _run(used: InUse, reader: Reader, outputs: Outputs, rows: output.Rows, start: int, done: str) -> Any:
    """Writes the chunks that are not done. For each chunk of this rank how often it was written, and how many of its rows are not
    finite, of inputs and of outputs."""
    context = used.context
    mesh, table = context.mesh, np.zeros((rows.n_chunks, 3))
    left = [chunk for chunk, mark in enumerate(done) if mark == "0"]
    if context.control.rank == 0:
        table[[chunk for chunk, mark in enumerate(done) if mark == "1"], 0] = 1
    mine = left[mesh.place::mesh.n_places]
    in_step = used.policy.cuts_parameters or context.placement.in_step
    again = left[-1:] * (-(-len(left) // mesh.n_places) - len(mine)) if in_step else []
    writer = output.Writer(rows, start, outputs.along)
    try:
        for i, (found, chunk) in enumerate(used.inference.run(map(reader.chunk, mine + again))):
            values = outputs.kept(found)
            n_wrong = outputs.n_nonfinite(values)
            if not context.counts or i >= len(mine):
                continue
            writer.write(chunk * rows.size, values, outputs.pieces(rows.shape))
            writer.mark(chunk)
            if outputs.along == 0:
                table[chunk] = 1, reader.nonfinite[chunk], n_wrong
        writer.sync()
    finally:
        writer.close()
    return table
