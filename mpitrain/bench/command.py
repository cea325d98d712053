"""The verbs of `mpitrain bench`: flags checked on every rank alike, MPI started, the measurement, everything freed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mpitrain.bench import arguments
from mpitrain.bench.report import Report
from mpitrain.comm.job import guard
from mpitrain.errors import UsageError

if TYPE_CHECKING:
    from mpitrain.comm.job.start import World
    from mpitrain.comm.messages.channel import Channel
    from mpitrain.train.machine.threads import Place

Measurement: TypeAlias = "Callable[[Channel, World, Report], object]"       # Ranks agree over the channel.


def run(verb: str, *, json: Path | None, **flags: Any) -> int:
    """`mpitrain bench VERB`. A verb is a function of its flags, which raises UsageError, and gives the measurement."""
    from mpitrain.comm.job.start import start
    from mpitrain.comm.messages.channel import Channel
    check, alone = VERBS[verb]
    with guard.symmetric():
        measure = check(**flags)
    world = start()
    channel, report = Channel(world.comm.Dup(), "bench"), Report(world.rank, json)
    if alone or world.size > 1:
        measure(channel, world, report)
    else:
        report.line("one rank has nothing to exchange; start two or more: mpirun -n 2 python -m mpitrain bench ...")
    channel.close()
    return 0


def as_in_training(channel: Channel) -> list[Place]:
    """Makes the process keep freed memory, as `mpitrain train` does; the ranks on this node."""
    from mpitrain.backend import keep_freed_memory
    from mpitrain.train.machine import threads
    keep_freed_memory()
    return threads.on_node(channel.gather_objects(threads.place()), channel.rank)


def allreduce(*, sizes: str, algorithms: str | None, dtypes: str, wire: str | None, pairs: int) -> Measurement:
    from mpitrain.bench.allreduce import bench_allreduce, known
    size_list, dtype_list = arguments.sizes(sizes), arguments.dtypes(dtypes)
    arguments.whole_elements(size_list, dtype_list)
    if wire is not None:
        arguments.wire(wire, dtype_list)
    flag = "--algorithms" if wire is None else f"--algorithms with --wire {wire}"
    names = arguments.algorithms(algorithms, known(wire), flag) if algorithms is not None else None
    arguments.at_least(pairs, 1, "--pairs")
    return partial(bench_allreduce, sizes=size_list, algorithms=names, dtypes=dtype_list, pairs=pairs, wire=wire)


def fit(*, sizes: str | None, pairs: int, out: Path | None, name: str | None) -> Measurement:
    from mpitrain.bench.fit import SIZES, bench_fit
    size_list = arguments.sizes(sizes) if sizes is not None else SIZES
    arguments.whole_elements(size_list, ["float32"])
    arguments.at_least(len(size_list), 3, "the number of --sizes to fit")
    arguments.at_least(pairs, 1, "--pairs")
    if out is None:
        if name is not None:
            raise UsageError("--name is that of the machine in a file; give --out FILE, too")
        return partial(bench_fit, sizes=size_list, turns=pairs)
    if out.suffix != ".toml" or out.is_dir() or not out.parent.is_dir():
        raise UsageError(f"--out takes a file to write that ends in .toml, in a folder that is there; found {out}")

    def measure(channel: Channel, world: World, report: Report) -> None:
        from mpitrain.bench.calibrate import calibrate
        from mpitrain.train.machine import threads
        as_in_training(channel)
        threads.pin(1)
        calibrate(world, report, out, name or out.stem)
    return measure


def exchange(*, parameters: int, bucket_bytes: str, pairs: int) -> Measurement:
    from mpitrain.bench.exchange import bench_exchange
    arguments.at_least(parameters, 1, "--parameters")
    nbytes = arguments.size(bucket_bytes, "--bucket-bytes")
    arguments.at_least(pairs, 1, "--pairs")
    return partial(bench_exchange, parameters=parameters, bucket_bytes=nbytes, pairs=pairs)


def train(*, models: str | None, precision: str, steps: int, device: str) -> Measurement:
    from mpitrain.bench.train import bench_train
    from mpitrain.bench.workloads import WORKLOADS
    from mpitrain.train.machine import threads
    names = arguments.names(models, WORKLOADS, "--models") if models is not None else list(WORKLOADS)
    precisions = arguments.words(precision, "--precision")
    arguments.at_least(steps, 1, "--steps")

    def measure(channel: Channel, world: World, report: Report) -> None:
        pinned = threads.pin(0, as_in_training(channel))
        bench_train(channel, world, report, models=names, precisions=precisions, steps=steps, threads=pinned, device=device)
    return measure


def models(*, models: str, batch: int, size: int | None, steps: int, precision: str) -> Measurement:
    from mpitrain.bench.models import bench_models, known, usual
    from mpitrain.train.machine import threads
    names = known() if models == "all" else arguments.names(models, known(), "--models")
    chosen = arguments.names(precision, arguments.DTYPES, "--precision")
    for flag, number in (("--batch", batch), ("--size", 1 if size is None else size), ("--steps", steps)):
        arguments.at_least(number, 1, flag)
    for name in names:
        usual(name, size)                             # refused before MPI is started

    def measure(channel: Channel, world: World, report: Report) -> None:
        pinned = threads.pin(0, as_in_training(channel))
        bench_models(channel, world, report, models=names, batch=batch, size=size, steps=steps, precision=chosen[0],
                     threads=pinned)
    return measure


def memory(*, models: str) -> Measurement:
    from mpitrain.bench.footprint import bench_memory
    from mpitrain.bench.workloads import WORKLOADS
    from mpitrain.train.machine import threads
    names = arguments.names(models, WORKLOADS, "--models")

    def measure(channel: Channel, world: World, report: Report) -> None:
        threads.pin(0, as_in_training(channel))
        bench_memory(channel, world, report, models=names)
    return measure


def pipeline(*, schedules: str, micro_batches: int, chunks: int, blocks: int, width: int, rows: int, steps: int) -> Measurement:
    from mpitrain.bench.pipeline import Stack, bench_pipeline, take_a_core
    from mpitrain.schedules.pipeline_simulate import FORMULAS
    from mpitrain.train.machine import threads
    names = arguments.names(schedules, [name for name in FORMULAS if name != "forward_only"], "--schedules")
    for flag, number, least in (("--micro-batches", micro_batches, 1), ("--chunks", chunks, 2), ("--blocks", blocks, 1),
                                ("--width", width, 1), ("--rows", rows, 1), ("--steps", steps, 1)):
        arguments.at_least(number, least, flag)

    def measure(channel: Channel, world: World, report: Report) -> None:
        node = as_in_training(channel)
        threads.pin(1)
        take_a_core(channel, node)
        bench_pipeline(channel, world, report, schedules=names, stack=Stack(blocks, width, rows), n_micro=micro_batches,
                       chunks=chunks, steps=steps)
    return measure


def compress(*, compressors: str, elements: int, repeats: int) -> Measurement:
    from mpitrain.bench.compress import bench_compress
    from mpitrain.parallel.compress.compressor import make_compressor
    makes = [make_compressor(name) for name in arguments.words(compressors, "--compressors")]
    arguments.at_least(elements, 1, "--elements")
    arguments.at_least(repeats, 1, "--repeats")

    def measure(channel: Channel, world: World, report: Report) -> None:
        as_in_training(channel)
        bench_compress(channel, world, report, makes=makes, elements=elements, repeats=repeats)
    return measure


def energy(*, seconds: float, repeats: int, root: Path, out: Path | None) -> Measurement:
    from mpitrain.bench.energy import bench_energy
    from mpitrain.errors import UsageError
    from mpitrain.train.machine import threads
    if not 0.1 <= seconds <= 60:
        raise UsageError(f"--seconds must lie between 0.1 and 60, in which no counter begins anew twice, found {seconds:g}")
    arguments.at_least(repeats, 2, "--repeats")

    def measure(channel: Channel, world: World, report: Report) -> None:
        as_in_training(channel)
        threads.pin(1)
        bench_energy(channel, world, report, seconds=seconds, repeats=repeats, root=root, out=out)
    return measure


# Each verb, and whether one rank alone has something to measure.
VERBS: dict[str, tuple[Callable[..., Measurement], bool]] = {
    "allreduce": (allreduce, False), "fit": (fit, False), "exchange": (exchange, False), "train": (train, True),
    "memory": (memory, True), "models": (models, True), "pipeline": (pipeline, False), "compress": (compress, True),
    "energy": (energy, True)}
