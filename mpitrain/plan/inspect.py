"""The output of `mpitrain inspect`: names, shapes, placement, the schedule drawn, SHA-256 sums; without MPI."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import numpy as np

from mpitrain import nn
from mpitrain.backend import CPU, keep_freed_memory
from mpitrain.checkpoint import store
from mpitrain.checkpoint.folders import MANIFEST, candidates
from mpitrain.checkpoint.hashes import array_sha256
from mpitrain.checkpoint.manifest import Checkpoint, load
from mpitrain.config import Config, load_config
from mpitrain.data import report
from mpitrain.data.transforms import FIT_ROWS
from mpitrain.errors import MissingError, MpitrainError, UsageError, name_and_text
from mpitrain.errors import place as where
from mpitrain.nn.by_name import ByName
from mpitrain.optim import Optimizer
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.placement.bytes import memory_text
from mpitrain.placement.place import Placement
from mpitrain.placement.shard_cuts import probe
from mpitrain.placement.stages import Stage
from mpitrain.plan.flops import count
from mpitrain.plan.low_bits import table_lines
from mpitrain.plan.memory import forecast_of
from mpitrain.plan.memory_lines import forecast_lines, table
from mpitrain.plan.prepare import grid_of, open_data, prepare, try_by_itself
from mpitrain.schedules.grid import REPLICAS
from mpitrain.schedules.microtree import share
from mpitrain.schedules.pipeline_check import actions_of, find_schedule
from mpitrain.schedules.pipeline_draw import describe
from mpitrain.train.build.from_config import checkpoint_folder, never_thawed
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.sizes import said_by_data, with_sizes


def inspect(path: Path, overrides: list[str], *, ranks: int | None = None) -> Iterator[str]:
    """Lines about a configuration (.toml), a run folder or checkpoint, or data; `ranks` (default: one) places a configuration.
    UsageError for what only a configuration takes."""
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks must be at least 1, found {ranks}")
    if path.suffix == ".toml":
        keep_freed_memory()                  # the pool of this process counts bytes of arrays
        yield from inspect_config(load_config(path, overrides), ranks or 1)
    elif not path.exists():
        raise MissingError("expected a configuration (.toml), a run folder, a checkpoint, or data", file=path)
    elif overrides or ranks is not None:
        raise UsageError(f"{overrides[0] if overrides else '--ranks'} is for a configuration (.toml), and {path} is none")
    elif path.is_dir() and candidates(checkpoint_folder(path)):
        yield from inspect_checkpoint(checkpoint_folder(path), path)
    elif (path / MANIFEST).is_file() and path.name.startswith("step-"):
        yield from checkpoint_lines(load(path))
    else:
        yield from report.info(path)


def inspect_config(config: Config, ranks: int) -> Iterator[str]:
    """The model's parameters (for cut layers, the first rank's), the cut of the batch, the buckets that travel, and the
    schedule; no large matrix is allocated. It refuses as `train` does, with the same error before the first line."""
    grid, inputs = grid_of(config, ranks), open_data(config)
    written = config
    run = prepare(with_sizes(config, inputs), grid, inputs)
    config, made, parts, valid, model, m = run.config, run.made, run.parts, run.valid, run.model, run.config.mesh
    inputs.transforms.fit(inputs.training, inputs.train_rows[:FIT_ROWS])       # a run reads all rows, for its statistics
    n_parameters, worked = model.count_parameters(), work_line(model, inputs)
    placed = run.placed()
    try_by_itself(config, placed, made, inputs)
    run.refuse_rest(placed)
    block, cp, n_micro, pp = config.model.arguments.get("block"), grid.size("cp"), valid.n_micro, grid.size("pp")
    yield f"{config.run.name}: model {config.model.name}, {n_parameters:,} parameters"
    if given := said_by_data(written, config):
        yield given
    yield worked
    yield f"mesh {grid}, {ranks} rank{'s' if ranks > 1 else ''}"
    if cp > 1 and block is not None:
        yield f"samples of {block} positions, {block // cp} on each rank"
    yield from table(("parameter", "shape", "placement"),
                     [(name, shape_text(p.shape), placement_text(p)) for name, p in model.named_parameters() if not p.twin_of])
    buffers = [(name, shape_text(b.shape)) for name, b in model.named_buffers()]
    if buffers:
        yield from table(("buffer", "shape"), buffers)
    yield from never_thawed(config, config.train.steps or config.train.epochs * valid.sampler.steps_per_epoch)
    steps = config.train.steps or config.train.epochs * valid.sampler.steps_per_epoch
    said = [line for part in parts for line in part.described(steps)]
    yield from said
    if not config.workers.count:
        yield f"global batch of {config.train.batch_size} rows in {n_micro} micro-batches"
    stages = [placed.at_stage(index) for index in range(pp)]
    if pp > 1:
        yield from stage_lines([p.stage for p in stages])
    yield from schedule_lines(pp, grid.n_places, n_micro, name=str(m.schedule), chunks=m.chunks, folder=config.folder)
    yield from bucket_lines(stages)
    tried = made.optimizer(probe())
    yield from exchange_lines(config, stages, tried, valid.level, steps)
    yield bytes_line(stages, tried)
    yield from forecast_lines(forecast_of(config, placed, inputs))


def work_line(model: nn.Module, inputs: Inputs) -> str:
    """The multiply-adds of a sample, of a model that no rank has a part of yet."""
    try:
        sample = Feed(CPU, np.dtype("float32"), tokens=inputs.tokens).tensors(inputs.sample()[0])
        work = count(model, sample if isinstance(sample, ByName) else sample.array)
    except Exception as error:               # a model of one's own that zeros do not suit, or an error that is told below
        why = error.message if isinstance(error, MpitrainError) else name_and_text(error, where(error))
        return f"multiply-adds of a sample: not counted ({why})"
    apart = f", and {work.transforms} Fourier transforms" if work.transforms else ""
    return f"multiply-adds of a sample: {work.forward:,} forward{apart}, 3 times as many in a training step"


def bytes_line(stages: Sequence[Placement], optimizer: Optimizer) -> str:
    """Parameters, gradients and optimizer state of a rank, by formula, for the stage that has most; with one
    copy per node as if there were one node."""
    comm, replicas = stages[0].comm, stages[0].grid.count(REPLICAS)
    found = [p.bytes(p.layout(), p.kind, optimizer, per_node=replicas if comm.node_shared else 1) for p in stages]
    return memory_text(found, comm.sharding, per_node=comm.node_shared and replicas > 1)


def stage_lines(stages: Sequence[Stage]) -> Iterator[str]:
    """The blocks of each stage of a pipeline."""
    for stage in stages:
        for chunk, part in enumerate(stage.chunks):
            yield f"  {stage.describe(stage.virtual(chunk))}: {sum(p.size for p in part.parameters()):,} parameters"


def schedule_lines(pp: int, dp: int, n_micro: int, *, name: str = "1f1b", chunks: int = 1,
                   folder: Path | None = None) -> Iterator[str]:
    """The micro-batches of each place along dp, in their order; for pipelines a drawing for each number of them."""
    shares = [share(place, dp, n_micro) for place in range(dp)]
    for number, (first, last) in enumerate(shares):
        if pp > 1:
            yield f"  pipeline {number}: micro-batches {first}..{last - 1}"
            continue
        schedule = find_schedule(name, folder, n_stages=1, n_micro=last - first, chunks=chunks)
        order = " ".join(map(str, actions_of(schedule, 0, 1, last - first, chunks)))
        yield f"  rank {number}: micro-batches {first}..{last - 1}: {order}"
    if pp > 1:
        width = get_terminal_size().columns
        for count in sorted({last - first for first, last in shares}):
            yield from describe(name, pp, count, chunks, folder=folder, width=width)


def bucket_lines(stages: Sequence[Placement]) -> Iterator[str]:
    """The cuts of each stage's flat gradient into buckets, computed from shapes alone."""
    comm = stages[0].comm
    until = ", until measured ready times say better" if comm.bucket_mb == "auto" else ""
    for p in stages:
        layout = p.layout()
        buckets = p.buckets(layout)
        plural, of_stage = "s" if len(buckets) != 1 else "", f" of stage {p.stage.index}" if len(stages) > 1 else ""
        yield f"{len(buckets)} gradient bucket{plural}{of_stage} ({comm.algorithm}), in the order they start{until}"
        for bucket in buckets:
            yield f"  {bucket.index}: {(bucket.stop - bucket.start) * layout.dtype.itemsize / 2**20:.2f} MiB, {bucket.name}"


def inspect_checkpoint(folder: Path, run: Path) -> Iterator[str]:
    """The newest whole checkpoint, after the lines of run.json."""
    record = run / "run.json"
    if record.is_file():
        about: dict[str, Any] = json.loads(record.read_text())
        for key in ("status", "steps", "ranks", "mesh", "parameters_sha256", "buffers_sha256", "metrics"):
            if key in about:
                yield f"{key}: {json.dumps(about[key])}"
        if (made := about.get("made", {})).get("by") == "quantize":
            yield from table_lines(made)
    if (run / "trace.json").is_file():
        yield f"profile: {run / 'trace.json'} (open it in ui.perfetto.dev)"
    names = ", ".join(path.name for path in candidates(folder))
    yield f"checkpoints: {names}"
    yield from checkpoint_lines(store.latest(folder))


def checkpoint_lines(found: Checkpoint) -> Iterator[str]:
    yield f"step {found.step}"
    rows = [(name, found.arrays[name].dtype.name, shape_text(found.arrays[name].shape), array_sha256(found.read(name))[:16])
            for name in found.arrays]
    yield from table(("array", "dtype", "shape", "sha256"), rows)
    pruned = [name for name in found.arrays if name.startswith("mask/")]
    if pruned:
        from mpitrain.plan.zeros import zeros_lines
        yield from zeros_lines(found, [name.removeprefix("mask/") for name in pruned])


def shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def placement_text(parameter: nn.Parameter) -> str:
    return ", ".join(f"{axis} cuts dim {dim}" for axis, dim in parameter.placement.items()) or "replicated"


def exchange_lines(config: Config, stages: Sequence[Placement], tried: Optimizer, level: Any, steps: int) -> Iterator[str]:
    """What ranks exchange less of, and what that keeps, in a run of so many steps; nothing of most runs."""
    kind = stages[0].kind
    yield from config.comm.idle
    if config.comm.compress and kind == "none":
        from mpitrain.plan.compression import compression_lines
        yield from compression_lines(config, stages)
    if tried.sends or config.comm.compress_parameters or (config.comm.compress and kind != "none"):
        from mpitrain.plan.packed import packed_lines
        yield from packed_lines(config, stages, tried, steps)
    if level is not None:
        from mpitrain.plan.levels import level_lines
        yield from level_lines(config, stages, level)
