"""Size, work, time and energy of models as they are built in: one line a model.

    describe | count multiply-adds from shapes | allocate | time forward passes (eval) | time steps: forward, backward, AdamW

A step begins backward with fixed numbers in place of a loss, so that any output will do. Samples are made up. With several
ranks each does the same, and a time is that of the slowest: what models cost where all cores are at work.
"""

from __future__ import annotations

import gc
import inspect
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpitrain import optim
from mpitrain.autograd import Tensor, no_grad, run_backward
from mpitrain.backend import random
from mpitrain.backend.memory import pool_in_use
from mpitrain.bench.pairs import Clock, quartiles
from mpitrain.bench.report import Report, machine
from mpitrain.comm.job import guard
from mpitrain.comm.job.start import World
from mpitrain.comm.messages.channel import Channel
from mpitrain.energy.zones import Energy
from mpitrain.errors import UsageError
from mpitrain.models import MODELS
from mpitrain.nn import Module
from mpitrain.plan.flops import TRAINING, count

WARM_UP = 1                          # A first pass touches memory for the first time, and compiles.
IMAGE = (3, 224, 224)
LR = 1e-6                            # Values hardly move: their training is of no interest here.


@dataclass(frozen=True)
class Usual:
    """The arguments that a model has no default for, and the shape of a sample: of floats, or of `tokens` different tokens."""

    shape: tuple[int, ...] = IMAGE
    arguments: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0


GPT2 = {"layers": 12, "heads": 12, "width": 768, "block": 1024, "vocabulary": 50257, "bias": True}
LLAMA = {"layers": 12, "heads": 12, "key_heads": 4, "width": 768, "block": 1024, "vocabulary": 32000}
RECURRENT = {"inputs": 8, "hidden": 64, "outputs": 1}
SERIES = {"inputs": 1, "outputs": 2}
USUAL: dict[str, Usual] = {
    "mlp": Usual((784,), {"inputs": 784, "hidden": [1024, 1024], "outputs": 10}),
    **{name: Usual((1, 28, 28)) for name in ("lenet", "autoencoder", "vae")},
    **{name: Usual((3, 32, 32)) for name in ("resnet20", "resnet32", "resnet56")},
    "unet": Usual((1, 128, 128)), "fno": Usual((1, 64, 64)),
    "gpt": Usual((64,), GPT2, tokens=50257), "llama": Usual((64,), LLAMA, tokens=32000),
    **{name: Usual((64,), tokens=50257) for name in ("gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl")},
    **{name: Usual((128,), tokens=30522) for name in ("bert", "distilbert")}, "t5": Usual((626,), tokens=32128),
    "lstm": Usual((100, 8), RECURRENT), "gru": Usual((100, 8), RECURRENT),
    "tcn": Usual((100, 8), {"inputs": 8, "channels": [64] * 4, "outputs": 1}),
    "fcn": Usual((100, 1), SERIES), "inception_time": Usual((100, 1), SERIES),
    "deepfm": Usual((8,), {"categories": [1000] * 8}, tokens=1000), "ft_transformer": Usual((8,), {"numeric": 8, "outputs": 2}),
    "graphsage": Usual((1 + 25 + 25 * 10, 64), {"inputs": 64, "outputs": 8}),
}
"""Of models that do not take images of 224 x 224, or have arguments without a default."""


def known() -> list[str]:
    """The models that can be measured: those of `USUAL`, and those whose arguments have defaults."""
    return [name for name in MODELS if name in USUAL or not _required(MODELS[name])]


def usual(name: str, size: int | None) -> Usual:
    """How a model is measured; `size`: the height and width of its images instead. UsageError for one that takes no images."""
    found = USUAL.get(name, Usual())
    if size is None:
        return found
    if len(found.shape) != 3:
        raise UsageError(f"--size is of images, and {name} takes samples of shape {found.shape}; leave --size out, or {name}")
    arguments = {"size": size} if "size" in inspect.signature(MODELS[name]).parameters else {}
    return Usual((found.shape[0], size, size), {**found.arguments, **arguments}, found.tokens)


def _required(make: Callable[..., Any]) -> bool:
    return any(p.default is p.empty for p in inspect.signature(make).parameters.values())


def bench_models(channel: Channel, world: World, report: Report, *, models: Sequence[str], batch: int, size: int | None,
                 steps: int, precision: str, threads: int) -> None:
    """One record for each model. Collective."""
    with guard.symmetric():
        chosen = [usual(name, size) for name in models]
    about, energy = machine(channel), Energy()
    report.line(f"models on {world.size} rank{'s' * (world.size > 1)}, {threads} thread{'s' * (threads > 1)} each, batches of "
                f"{batch}, {precision}; medians of {steps}\n"
                f"a multiply-add is 2 operations, and a step has {TRAINING} times those of forward\n"
                f"joules are {f'unknown: {energy.why}' if energy.why else 'all that processors and memory of one node use'}\n"
                f"{'model':<20}{'parameters':>12}{'M mult-adds':>12}{'MiB':>8}{'kept MiB':>9}{'forward ms':>11}{'step ms':>10}"
                f"{'GFLOP/s':>8}{'J a step':>9}")
    for name, how in zip(models, chosen):
        found = measure(name, how, world, batch, steps, precision, energy)
        report.record({**found, "machine": about})
        kept, used = (found[key] for key in ("kept_bytes_a_sample", "step_joules"))
        report.line(f"{name:<20}{found['parameters']:>12,}{found['multiply_adds'] / 1e6:>12,.2f}{found['bytes'] / 2**20:>8.1f}"
                    f"{'-' if kept is None else f'{kept / 2**20:.2f}':>9}{found['forward_seconds'] * 1e3:>11.2f}"
                    f"{found['step_seconds'] * 1e3:>10.2f}{found['step_flops_a_second'] / 1e9:>8.1f}"
                    f"{'-' if used is None else f'{used:.2f}':>9}")


def measure(name: str, how: Usual, world: World, batch: int, steps: int, precision: str, energy: Energy) -> dict[str, Any]:
    """The record of one model. Times are of a batch, `multiply_adds` and `kept_bytes_a_sample` of one sample."""
    with guard.symmetric():
        work = count(MODELS[name](**how.arguments), samples(how, 1, "float32"))
        run = Run(MODELS[name](**how.arguments), samples(how, batch, precision), precision)
    clock = Clock(world)
    run.model.eval()
    forward, _ = _timed(clock, run.forward, steps, energy)
    run.model.train()
    kept = run.kept()
    step, joules = _timed(clock, run.step, steps, energy)
    seconds, flops = statistics.median(step), 2 * TRAINING * work.forward * batch
    found = {"bench": "models", "model": name, "arguments": how.arguments, "shape": how.shape, "batch": batch,
             "precision": precision, "ranks": world.size, "parameters": run.model.count_parameters(),
             "multiply_adds": work.forward, "fourier_transforms": work.transforms,
             "bytes": run.model.count_parameters() * run.storage.values.itemsize,
             "kept_bytes_a_sample": None if kept is None else kept // batch, "forward_seconds": statistics.median(forward),
             "step_seconds": seconds, "step_flops_a_second": flops / seconds,
             "forward_flops_a_second": 2 * work.forward * batch / statistics.median(forward), "step_joules": joules,
             "steps": steps, **dict(zip(("step_seconds_low", "step_seconds_high"), quartiles(step)))}
    del run
    gc.collect()                                  # The next model's memory is not to be this one's besides.
    return found


def samples(how: Usual, rows: int, precision: str) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(0)
    if how.tokens:
        return rng.integers(0, how.tokens, (rows, *how.shape))
    return rng.standard_normal((rows, *how.shape)).astype(precision)


def _timed(clock: Clock, run: Callable[[], Any], steps: int, energy: Energy) -> tuple[list[float], float | None]:
    """(seconds of each call, joules of one)."""
    for _ in range(WARM_UP):
        run()
    energy.joules()
    times = [clock.time(run) for _ in range(steps)]
    joules = energy.joules()
    return times, None if joules is None else joules / steps


class Run:
    """A model with memory, samples in memory, and AdamW."""

    def __init__(self, model: Module, x: np.ndarray[Any, Any], precision: str):
        self.model, self.x = model, x
        self.storage = model.initialize(0, precision)
        self.storage.attach_gradients()
        self.optimizer = optim.AdamW(self.storage, lr=LR)
        model.eval()                              # A norm in training wants more values of a channel than one sample may have.
        with no_grad(), self._scope(1):
            self.weights = np.random.default_rng(1).standard_normal(model(Tensor(x[:1])).shape).astype(precision)

    def forward(self) -> None:
        with no_grad(), self._scope(len(self.x)):
            self.model(Tensor(self.x))

    def step(self) -> None:
        self.optimizer.zero_grad()
        with self._scope(len(self.x)):
            y = self.model(Tensor(self.x))
        run_backward(y, np.repeat(self.weights, len(self.x), axis=0))
        self.optimizer.step()

    def kept(self) -> int | None:
        """Bytes that stay from a forward pass for backward; None where no pool counts arrays."""
        self.step()                               # Caches are full now.
        pool = pool_in_use()
        before = pool.usage().used if pool else 0
        with self._scope(len(self.x)):
            y = self.model(Tensor(self.x))
        found = pool.usage().used - before if pool else None
        del y
        return found

    def _scope(self, rows: int) -> Any:
        return random.use(random.Scope(0, 0, np.arange(rows, dtype=np.uint64)))
