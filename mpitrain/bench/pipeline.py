"""How long the stages of a pipeline idle: measured, simulated, and by formula, each schedule on the same stack of equal blocks.

    a step   | barrier | forwards and backwards by the schedule | slowest rank's time | update | compare the losses
    a stage  [F0][F1]......[B0------][F2][B1------]......[B2------]        . idle: it waits for another stage's message

Stages are timed from inside, so F, B and W (the weight gradient, where a schedule has it apart) are those of the very steps that
are judged. Idle is what is left of a step on all stages when F, B and W are taken away: waiting for messages, handling them, and
Python between the actions, which are printed too. All schedules train the same model from the same start, in turns, and the
losses of each step must be equal to the bit.
"""

from __future__ import annotations

import os
import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpitrain import data, nn, optim
from mpitrain.bench.pairs import Clock, in_turn, quartiles
from mpitrain.bench.report import Report, in_bytes, in_time, machine
from mpitrain.bench.train import Memory
from mpitrain.comm.job import guard
from mpitrain.comm.job.start import World
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.config.sections import Config, MeshConfig, TrainConfig
from mpitrain.errors import DesyncError
from mpitrain.schedules.pipeline import SCHEDULES
from mpitrain.schedules.pipeline_simulate import Cost, bubble, simulate_pipeline
from mpitrain.train.build.assembly import assemble
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.machine.threads import Place

LR, DECAY = 1e-3, 0.01
PROBES = 20                       # alpha and beta are fitted to so many messages of each size.
COMPUTE, KINDS = "compute", {"forward": "F", "backward": "B", "weight": "W"}
WAITS = {"wait": "messages", "exchange of the count": "count"}


class Task(NamedTuple):
    """A model and one global batch of it."""

    make: Callable[[], nn.Sequential]
    x: NDArray[Any]
    y: NDArray[Any]               # values, or classes
    stages: Any = "blocks"        # how the model is cut into stages


class Stack(NamedTuple):
    """The model and its batch: `blocks` equal ones of layer norm, `width` to 4 `width` with GELU, back, plus the input."""

    blocks: int
    width: int
    rows: int                     # rows of a micro-batch

    def task(self, n_micro: int) -> Task:
        rng = np.random.default_rng(0)
        x, y = (rng.standard_normal((self.rows * n_micro, self.width), dtype=np.float32) for _ in range(2))
        return Task(lambda: nn.Sequential(*((f"block{i}", Block(self.width)) for i in range(self.blocks))), x, y)


class Block(nn.Module):
    """x + narrow(gelu(wide(norm(x)))): a transformer's second half."""

    def __init__(self, width: int):
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width, activation="gelu")
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.narrow(self.wide(self.norm(x)))


class Spent:
    """What a pipeline's spans say: seconds of every action of a step, by kind and chunk, and of what it waited for."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.actions: dict[str, list[float]] = {"F": [], "B": [], "W": []}
        self.waits: dict[str, float] = {"messages": 0.0, "count": 0.0}

    def __call__(self, row: str, name: str) -> Any:
        return self._span(name if name in WAITS else name.split()[0])

    @contextmanager
    def _span(self, word: str) -> Iterator[None]:
        began = perf_counter()
        yield
        seconds = perf_counter() - began
        if word in KINDS:
            self.actions[KINDS[word]].append(seconds)
        elif word in WAITS:                                   # The trainer's spans around the pipeline are not the pipeline's.
            self.waits[WAITS[word]] += seconds

    @property
    def busy(self) -> float:
        return sum(sum(seconds) for seconds in self.actions.values())


class Contender:
    """One schedule on all ranks of `world`, a stage each, put together as training is; all of them make it and step it alike."""

    def __init__(self, name: str, task: Task, world: World, n_micro: int, chunks: int):
        self.name, self.n_micro, self.chunks = name, n_micro, chunks if name == "interleaved" else 1
        self.world, self.n_stages = world, world.size
        self._mesh = Mesh(world.comm, pp=world.size)
        rows, kind = len(task.x), "values" if task.y.dtype.kind == "f" else "classes"
        inputs = Inputs(Memory(task.x, task.y, kind), range(rows), None, range(0), data.Transforms())
        config = Config(train=TrainConfig(steps=1, batch_size=rows, micro_batches=n_micro),
                        mesh=MeshConfig(schedule=name, chunks=self.chunks, stages=task.stages))
        loss = nn.LOSSES["mse" if kind == "values" else "cross_entropy"]()
        self.job = assemble(task.make(), inputs, self._mesh, loss=loss, config=config, quiet=True,
                            optimizer=lambda storage: optim.AdamW(storage, lr=LR, weight_decay=DECAY))
        self.trainer: Any = self.job.trainer
        self.trainer.update.want_norm = False
        self.micro_batches: Any = self.trainer.loader.load(0)
        self.spent = Spent()
        self.job.timeline.listener = self.spent
        self._clock = Clock(world)
        self.losses: list[str] = []
        self.found: list[dict[str, Any]] = []

    def step(self, _: int) -> float:
        """Seconds of forwards and backwards on the slowest rank; the update comes after."""
        self.spent.clear()
        self.trainer.update.begin()
        seconds = self._clock.time(self.run)
        self._mine = {"busy": self.spent.busy, **self.spent.waits,
                      **{kind: statistics.median(of) * self.chunks if of else 0.0 for kind, of in self.spent.actions.items()}}
        began = perf_counter()
        self.trainer.update.finish()
        self._mine["update"] = perf_counter() - began
        everyone = self.job.channel.gather_objects(self._mine)
        self.losses.append(float(self.trainer.share(self._loss, (0.0, 0.0, 0.0))[0]).hex())
        self.found.append({"step": seconds, "stages": everyone})
        return seconds

    def run(self) -> None:
        self._loss = self.trainer.pipeline.run(self.micro_batches)

    def close(self) -> None:
        self.trainer.pipeline.reducer.close()
        self._mesh.close()

    def summary(self, steps: int, alpha: float, beta: float, message_bytes: int) -> dict[str, Any]:
        """Medians over the last `steps` steps; F, B and W in seconds of a whole stage, and the three idle fractions."""
        kept = self.found[-steps:]
        idle = [1 - sum(stage["busy"] for stage in step["stages"]) / (self.n_stages * step["step"]) for step in kept]
        seconds = [step["step"] for step in kept]

        def middle(key: str) -> list[float]:
            return [statistics.median(step["stages"][i][key] for step in kept) for i in range(self.n_stages)]
        f, b, w = (middle(kind) for kind in "FBW")
        cost = Cost(f, b, w, alpha, beta, message_bytes)
        forward, backward, weight = (statistics.fmean(values) for values in (f, b, w))
        return {"bench": "pipeline", "schedule": self.name, "stages": self.n_stages, "micro_batches": self.n_micro,
                "chunks": self.chunks, "seconds": statistics.median(seconds), "seconds_low": quartiles(seconds)[0],
                "seconds_high": quartiles(seconds)[1], "forward": f, "backward": b, "weight": w,
                "idle": statistics.median(idle), "idle_low": quartiles(idle)[0], "idle_high": quartiles(idle)[1],
                "idle_simulated": simulate_pipeline(SCHEDULES[self.name], self.n_stages, self.n_micro, cost,
                                                    self.chunks).idle_fraction(),
                "idle_by_formula": bubble(self.name, self.n_stages, self.n_micro, forward, backward, weight, self.chunks),
                "waited_for_messages": middle("messages"), "waited_for_count": middle("count"), "update": middle("update"),
                "message_bytes": message_bytes, "steps": steps}


def bench_pipeline(channel: Channel, world: World, report: Report, *, schedules: Sequence[str], stack: Stack, n_micro: int,
                   chunks: int, steps: int) -> None:
    """One record for each schedule. Collective. DesyncError where the losses of two schedules differ in a bit."""
    about, message_bytes = machine(channel), 4 * stack.rows * stack.width
    with guard.symmetric():
        task = stack.task(n_micro)
        contenders = {name: Contender(name, task, world, n_micro, chunks) for name in schedules}
    first = contenders[schedules[0]]
    alpha, beta = probe(first, message_bytes)
    report.line(f"{world.size} stages, {n_micro} micro-batches of {stack.rows} rows, {stack.blocks} blocks of width "
                f"{stack.width}, activations of {in_bytes(message_bytes)}; medians of {steps} steps\n"
                f"{'schedule':<13}{'step':>10}{'F':>11}{'B':>11}{'W':>11}{'idle':>8}{'simulated':>11}{'formula':>9}   of a step: "
                "waits for messages, for the count, other idle; then the update")
    in_turn([contender.step for contender in contenders.values()], steps)
    for contender in contenders.values():
        if contender.losses != first.losses:
            raise DesyncError(f"bench pipeline: the losses of {contender.name} are not those of {first.name} to the bit; its "
                              "times must not be used")
    for contender in contenders.values():
        record = contender.summary(steps, alpha, beta, message_bytes)
        if "1f1b" in contenders:                              # The machine's speed changes between two pairs.
            pairs = zip(contenders["1f1b"].found[-steps:], contender.found[-steps:], strict=True)
            record["speed_over_1f1b"] = statistics.median(base["step"] / turn["step"] for base, turn in pairs)
        report.record({**record, "alpha": alpha, "beta": beta, "machine": about})
        report.line(row(record))
    for contender in contenders.values():
        contender.close()


def take_a_core(channel: Channel, node: Sequence[Place]) -> None:
    """Binds this rank to a core of its own, where there are enough: two stages on one core would wait for each other unseen."""
    hosts = channel.gather_objects(socket.gethostname())
    place = hosts[:channel.rank].count(hosts[channel.rank])
    cores = sorted({core for rank in node for core in rank.cores})
    if len(cores) >= len(node):
        os.sched_setaffinity(0, {cores[place]})


def row(r: dict[str, Any]) -> str:
    """A line of the table."""
    mean, step = statistics.fmean, r["seconds"]
    waits = [mean(r[key]) / step for key in ("waited_for_messages", "waited_for_count")]
    kinds = [mean(r[key]) for key in ("forward", "backward", "weight")]
    times = "".join(f"{in_time(seconds) if seconds else '-':>11}" for seconds in kinds)
    speed = f"   {r['speed_over_1f1b']:.3f} x 1f1b" if "speed_over_1f1b" in r and r["schedule"] != "1f1b" else ""
    idle = f"{r['idle']:>8.1%}{r['idle_simulated']:>11.1%}{r['idle_by_formula']:>9.1%}"
    return (f"{r['schedule']:<13}{in_time(step):>10}{times}{idle}"
            f"   {waits[0]:.1%}, {waits[1]:.1%}, {r['idle'] - sum(waits):.1%}; {in_time(max(r['update']))}{speed}")


def probe(contender: Contender, nbytes: int) -> tuple[float, float]:
    """(alpha, beta) of a message between neighbouring stages, from small and large ones passed there and back."""
    link: Any = contender.trainer.pipeline.neighbours.link
    medians = []
    for size in (8, nbytes):
        array, times = np.zeros(size, np.uint8), []
        for _ in range(PROBES):
            contender.world.comm.Barrier()
            began = perf_counter()
            if link.rank == 0:
                link.send(array, 1, 0, "a probe")
                link.receive(array.shape, array.dtype, 1, 1, "a probe").wait()
            elif link.rank == 1:
                link.send(link.receive(array.shape, array.dtype, 0, 0, "a probe").wait() or array, 0, 1, "a probe")
            link.finish()
            times.append((perf_counter() - began) / 2)
        medians.append(statistics.median(times))
    alpha, beta = medians[0], max(0.0, (medians[1] - medians[0]) / nbytes)
    return tuple(contender.job.channel.broadcast_object([alpha, beta]))
