"""The verbs of `mpitrain bench`: arguments checked on every rank alike, MPI started, the measurement, everything freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpitrain.bench import arguments
from mpitrain.bench.report import Report
from mpitrain.comm.job import guard

if TYPE_CHECKING:
    from mpitrain.comm.job.start import World
    from mpitrain.comm.messages.channel import Channel


class Session(NamedTuple):
    """What every measurement gets: the ranks, a channel for agreements, and where results go."""

    world: World
    channel: Channel
    report: Report


@contextmanager
def open_session(json: Path | None) -> Iterator[Session]:
    from mpitrain.comm.job.start import start
    from mpitrain.comm.messages.channel import Channel
    world = start()
    channel = Channel(world.comm.Dup(), "bench")
    yield Session(world, channel, Report(world.rank, json))
    channel.close()


@contextmanager
def session(json: Path | None) -> Iterator[Session | None]:
    """None where there is one rank, after saying so: nothing is exchanged there, and the file stays empty."""
    with open_session(json) as opened:
        alone = opened.world.size == 1
        if alone:
            opened.report.line("one rank has nothing to exchange; start two or more: mpirun -n 2 python -m mpitrain bench ...")
        yield None if alone else opened


def allreduce(*, sizes: str, algorithms: str | None, dtypes: str, wire: str | None, pairs: int, json: Path | None) -> int:
    """`mpitrain bench allreduce`."""
    from mpitrain.bench.allreduce import bench_allreduce, known
    with guard.symmetric():
        size_list, dtype_list = arguments.sizes(sizes), arguments.dtypes(dtypes)
        arguments.whole_elements(size_list, dtype_list)
        if wire is not None:
            arguments.wire(wire, dtype_list)
        flag = "--algorithms" if wire is None else f"--algorithms with --wire {wire}"
        names = arguments.algorithms(algorithms, known(wire), flag) if algorithms is not None else None
        arguments.at_least(pairs, 1, "--pairs")
    with session(json) as s:
        if s is not None:
            bench_allreduce(s.channel, s.world, s.report, sizes=size_list, algorithms=names, dtypes=dtype_list, pairs=pairs,
                            wire=wire)
    return 0


def fit(*, sizes: str | None, pairs: int, json: Path | None) -> int:
    """`mpitrain bench fit`."""
    from mpitrain.bench.fit import SIZES, bench_fit
    with guard.symmetric():
        size_list = arguments.sizes(sizes) if sizes is not None else SIZES
        arguments.whole_elements(size_list, ["float32"])
        arguments.at_least(len(size_list), 3, "the number of --sizes to fit")
        arguments.at_least(pairs, 1, "--pairs")
    with session(json) as s:
        if s is not None:
            bench_fit(s.channel, s.world, s.report, sizes=size_list, turns=pairs)
    return 0


def exchange(*, parameters: int, bucket_bytes: str, pairs: int, json: Path | None) -> int:
    """`mpitrain bench exchange`."""
    from mpitrain.bench.exchange import bench_exchange
    with guard.symmetric():
        arguments.at_least(parameters, 1, "--parameters")
        nbytes = arguments.size(bucket_bytes, "--bucket-bytes")
        arguments.at_least(pairs, 1, "--pairs")
    with session(json) as s:
        if s is not None:
            bench_exchange(s.channel, s.world, s.report, parameters=parameters, bucket_bytes=nbytes, pairs=pairs)
    return 0


def train(*, models: str | None, precision: str, steps: int, json: Path | None) -> int:
    """`mpitrain bench train`."""
    from mpitrain.backend import keep_freed_memory
    from mpitrain.bench.train import bench_train
    from mpitrain.bench.workloads import WORKLOADS
    from mpitrain.train.machine import threads
    with guard.symmetric():
        names = arguments.names(models, WORKLOADS, "--models") if models is not None else list(WORKLOADS)
        precisions = arguments.words(precision, "--precision")
        arguments.at_least(steps, 1, "--steps")
    keep_freed_memory()                                       # as `mpitrain train` does
    with open_session(json) as s:
        pinned = threads.pin(0, threads.on_node(s.channel.gather_objects(threads.place()), s.world.rank))
        bench_train(s.channel, s.world, s.report, models=names, precisions=precisions, steps=steps, threads=pinned)
    return 0


def memory(*, models: str, json: Path | None) -> int:
    """`mpitrain bench memory`."""
    from mpitrain.backend import keep_freed_memory
    from mpitrain.bench.footprint import bench_memory
    from mpitrain.bench.workloads import WORKLOADS
    from mpitrain.train.machine import threads
    with guard.symmetric():
        names = arguments.names(models, WORKLOADS, "--models")
    keep_freed_memory()                                       # as `mpitrain train` does
    with open_session(json) as s:
        threads.pin(0, threads.on_node(s.channel.gather_objects(threads.place()), s.world.rank))
        bench_memory(s.channel, s.world, s.report, models=names)
    return 0


def pipeline(*, schedules: str, micro_batches: int, chunks: int, blocks: int, width: int, rows: int, steps: int,
             json: Path | None) -> int:
    """`mpitrain bench pipeline`."""
    from mpitrain.backend import keep_freed_memory
    from mpitrain.bench.pipeline import Stack, bench_pipeline, take_a_core
    from mpitrain.schedules.pipeline_simulate import FORMULAS
    from mpitrain.train.machine import threads
    with guard.symmetric():
        names = arguments.names(schedules, [name for name in FORMULAS if name != "forward_only"], "--schedules")
        for flag, number, least in (("--micro-batches", micro_batches, 1), ("--chunks", chunks, 2), ("--blocks", blocks, 1),
                                    ("--width", width, 1), ("--rows", rows, 1), ("--steps", steps, 1)):
            arguments.at_least(number, least, flag)
    keep_freed_memory()                                       # as `mpitrain train` does
    with session(json) as s:
        if s is not None:
            node = threads.on_node(s.channel.gather_objects(threads.place()), s.world.rank)
            threads.pin(1)
            take_a_core(s.channel, node)
            bench_pipeline(s.world, s.channel, s.report, schedules=names, stack=Stack(blocks, width, rows), n_micro=micro_batches,
                           chunks=chunks, steps=steps)
    return 0


VERBS: dict[str, Callable[..., int]] = {"allreduce": allreduce, "fit": fit, "exchange": exchange, "train": train,
                                        "memory": memory, "pipeline": pipeline}
