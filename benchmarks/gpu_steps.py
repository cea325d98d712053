"""Pieces of benchmarks/gpu.py with whole training steps: speed and memory, losses, transfers, feed, the first step."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import gpu_tools
import numpy as np
from gpu_tools import Bench, Record, child, in_turn, piece

from mpitrain import models
from mpitrain.backend import asnumpy
from mpitrain.bench.train import DECAY, LR, WARM_UP, Training
from mpitrain.bench.workloads import WORKLOADS, Workload, of_transformer, residual
from mpitrain.comm.job.start import start

STEPS = ("gpt2 16 x 1024", "gpt2 64 x 1024", "gpt 1.5B", "resnet20 128", "resnet20 1024", "resnet18 256", "resnet50 256")


def workload(bench: Bench, name: str) -> Workload:
    """Of the sizes that the bars name."""
    def gpt(layers: int, heads: int, width: int, batch: int) -> Workload:
        block, vocabulary = 1024, 50304
        if bench.tiny:
            layers, heads, width, batch, block, vocabulary = 1, 2, 16, 2, 8, 32
        return Workload(lambda: models.gpt(layers, heads, width, block, vocabulary, bias=True, activation="gelu_tanh"), batch,
                        (block,), vocabulary, of_transformer(layers, width, block, vocabulary), tokens=True)

    def images(kind: str, batch: int, size: int, classes: int, products: int) -> Workload:
        return Workload(models.MODELS[kind], *bench.size((batch, (3, size, size)), (2, (3, 8, 8))), classes, 6 * products)
    small = sum(residual(32, 16, 16, 3)) * 3
    return {"gpt2 16 x 1024": lambda: gpt(12, 12, 768, 16), "gpt2 64 x 1024": lambda: gpt(12, 12, 768, 64),
            "gpt2 4 x 1024": lambda: gpt(12, 12, 768, 4), "gpt 1.5B": lambda: gpt(48, 25, 1600, 8),
            "resnet20 128": lambda: images("resnet20", 128, 32, 10, small),
            "resnet20 1024": lambda: images("resnet20", 1024, 32, 10, small),
            "resnet18 256": lambda: images("resnet18", 256, 224, 1000, 1_814_073_344),
            "resnet50 256": lambda: images("resnet50", 256, 224, 1000, 4_089_184_256)}[name]()


def training(bench: Bench, load: Workload, precision: str = "bfloat16", **train: Any) -> Training:
    return Training(load, start().comm, sections={"train": {"device": "gpu", "precision": precision, **train}})


def parameters(ours: Training) -> list[np.ndarray[Any, Any]]:
    return [asnumpy(p.master) for p in ours.model.parameters()]


def beside_torch(bench: Bench, name: str, load: Workload, theirs: Callable[[], Any], channels_last: bool) -> Iterator[Record]:
    """A training step in bfloat16 beside PyTorch's, eager and compiled, from the same values on the same batches."""
    import torch
    import torch_gpu
    ours = training(bench, load)
    values = parameters(ours)
    ours.run(WARM_UP)
    first = ours.first_and_last()[0]
    sides: dict[str, Callable[[], Any]] = {"ours": ours.launch}
    memory = {"ours": bench.xp.get_default_memory_pool().total_bytes() + sum(
        pool.total_bytes() for pool in getattr(getattr(ours.job.trainer.pipeline, "graphs", None), "pools", ()))}
    for compiled in bench.size((False, True), (False,)):
        side = torch_gpu.side(theirs(), ours.batches, values, compiled=compiled, lr=LR, decay=DECAY, channels_last=channels_last,
                              device=bench.torch)
        if not compiled:
            yield {"what": f"{name}: first losses", "ours": first, "torch": torch_gpu.first_losses(side)}
        if bench.torch == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM_UP):
            side.step()
        sides["compiled" if compiled else "eager"] = side.step
        memory["compiled" if compiled else "eager"] = torch.cuda.max_memory_allocated() if bench.torch == "cuda" else 0
    times = in_turn(bench, sides)
    ours.check(name)
    per_sample = load.shape[0] if load.tokens else 1
    yield {"what": name, **{f"{side}_s": seconds for side, seconds in times.items()},
           "per_s": load.batch * per_sample / times["ours"], "tflops": load.flops / times["ours"] / 1e12,
           **{f"of_{side}": seconds / times["ours"] for side, seconds in times.items() if side != "ours"},
           **{f"{side}_bytes": size for side, size in memory.items()}}
    ours.close()


def steps_beside_torch(name: str, bench: Bench) -> Iterator[Record]:
    import torch_gpu
    theirs = partial(torch_gpu.model, name, tiny=bench.tiny)
    theirs()                                                 # what it imports may be missing
    return beside_torch(bench, name, workload(bench, name), theirs, name.startswith("resnet"))


@piece("bench train")
def bench_train(bench: Bench) -> Iterator[Record]:
    """The models of `mpitrain bench train --device gpu`, at its sizes, beside PyTorch."""
    import torch_side
    for name in bench.size(("mlp", "lenet", "resnet20", "gpt-nano", "gpt-baby"), ("lenet",)):
        load = replace(WORKLOADS[name], batch=bench.size(WORKLOADS[name].batch, 2))
        yield from beside_torch(bench, name, load, torch_side.MODELS[name], name in torch_side.IMAGES)


for _name in STEPS:
    piece(_name)(partial(steps_beside_torch, _name))


def losses_of(made: Training, steps: int) -> list[float]:
    made.run(steps)
    made.close()
    return [float(loss) for loss in made.losses]


@piece("repeated")
def repeated(bench: Bench) -> Iterator[Record]:
    """A small GPT: twice on the GPU, on the host, and in bfloat16 beside PyTorch's from the same weights."""
    import torch_gpu
    steps, load = bench.size(200, 6), bench.size(WORKLOADS["gpt-nano"], workload(bench, "gpt2 4 x 1024"))
    on_gpu, again = (losses_of(training(bench, load, "float32"), steps) for _ in range(2))
    on_host = losses_of(Training(load, start().comm, sections={"train": {"device": "cpu"}}), steps)
    yield {"what": f"gpt-nano, {steps} steps in float32", "equal": on_gpu == again,
           "from_host": max(abs(a - b) / abs(b) for a, b in zip(on_gpu, on_host, strict=True))}
    half = training(bench, load)
    made = torch_gpu.model("gpt2", tiny=True) if bench.tiny else torch_gpu.torch_side.MODELS["gpt-nano"]()
    theirs = torch_gpu.side(made, half.batches, parameters(half), compiled=False, lr=LR,
                            decay=DECAY, device=bench.torch)
    curve = losses_of(half, steps)
    yield {"what": f"gpt-nano, {steps} steps in bfloat16",
           "from_torch": max(abs(a - float(theirs.step())) for a in curve)}


@piece("transfers")
def transfers(bench: Bench) -> Iterator[Record]:
    """What a warm step asks for: launch by launch, then as a captured graph."""
    for graph in ("off", "on"):
        ours = training(bench, workload(bench, "gpt2 4 x 1024"), graph=graph)
        ours.run(WARM_UP)
        batch = sum(np.asarray(part).nbytes for part in ours.batches[0])
        yield {"what": f"a step of GPT-2, graph {graph}", **gpu_tools.asked_of(bench, ours.launch), "batch": batch}
        ours.close()


@dataclass(frozen=True)
class Stored(Workload):
    """Images as bytes in a file, from which the loader reads each batch anew."""

    folder: str = ""

    def samples(self, count: int, seed: int) -> tuple[Any, Any]:
        rng, path = np.random.default_rng(seed), Path(self.folder, "images.npy")
        np.save(path, rng.integers(0, 256, (count, *self.shape), dtype=np.uint8))
        return np.load(path, mmap_mode="r"), rng.integers(0, self.classes, count)


@piece("feed")
def feed(bench: Bench) -> Iterator[Record]:
    """Steps whose batches a loader reads and sends ahead, and steps whose batches lie on the device."""
    load, steps = workload(bench, bench.size("resnet18 256", "resnet20 128")), bench.size(20, 2)
    with tempfile.TemporaryDirectory() as folder:
        ours = training(bench, Stored(**vars(load), folder=folder))
        trainer: Any = ours.job.trainer
        ours.run(WARM_UP)
        there = [[replace(m, there=(trainer.pipeline.feed.put(trainer.pipeline.feed.host_inputs(m.x)),
                                    bench.device.put(trainer.pipeline.feed.host_targets(m.y)))) for m in micro_batches]
                 for micro_batches in ours._micro_batches]

        def resident() -> None:
            for step in range(steps):
                ours.losses.append(trainer.train_step(there[step % len(there)]).mean)

        def loaded() -> None:
            for _, micro_batches in trainer.ahead(trainer.loader.iterate(0, steps)):
                ours.losses.append(trainer.train_step(micro_batches).mean)
        found: dict[str, list[float]] = {"resident": [], "loaded": []}
        for _ in range(bench.size(gpu_tools.ROUNDS, 1)):
            for name, work in (("resident", resident), ("loaded", loaded)):
                bench.device.synchronize()
                began = time.perf_counter()
                work()
                bench.device.synchronize()
                found[name].append((time.perf_counter() - began) / steps)
        finite = bool(np.isfinite([float(loss) for loss in ours.losses]).all())
        trainer.loader.close()
        ours.close()
    times = {name: statistics.median(seconds) for name, seconds in found.items()}
    yield {"what": "images stored as bytes, ResNet-18", **times, "of_resident": times["loaded"] / times["resident"],
           "finite": finite}


def first_of(bench: Bench, whose: str) -> Iterator[Record]:
    """In a process of its own: seconds of the first step, with all that is compiled for it."""
    name = "gpt2 4 x 1024"
    if whose == "ours":
        ours = training(bench, workload(bench, name))
        began = time.perf_counter()
        ours.run(1)
        yield {"seconds": time.perf_counter() - began, "loss": float(ours.losses[0])}
        ours.close()
        return
    import torch_gpu
    x, y = (torch_gpu.torch.randint(0, bench.size(50304, 32), bench.size((4, 1024), (2, 8))).numpy() for _ in range(2))
    side = torch_gpu.side(torch_gpu.model(name, tiny=bench.tiny), [(x, y)], None, compiled=not bench.tiny, lr=LR, decay=DECAY,
                          device=bench.torch)
    began = time.perf_counter()
    loss = float(side.step())
    yield {"seconds": time.perf_counter() - began, "loss": loss}


@piece("first step")
def first_step(bench: Bench) -> Iterator[Record]:
    for whose in ("ours", "torch"):
        with tempfile.TemporaryDirectory() as folder:
            ours = () if bench.tiny else ("MPITRAIN_CACHE_DIR",)      # to compile the host's takes 20 s and tries nothing
            kept = {name: str(Path(folder, name)) for name in (*ours, "CUPY_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
                                                               "TRITON_CACHE_DIR")}
            cold, warm = (child(bench, "--first-of", whose, env=kept)[0]["seconds"] for _ in range(2))
        yield {"what": f"first step of GPT-2, {whose}", "cold": cold, "warm": warm}


@piece("baseline")
def baseline(bench: Bench) -> Iterator[Record]:
    """GPT-2 in float32 by array expressions of CuPy alone: what a GPU did before there were kernels for it."""
    from mpitrain.kernels.device import FILES, VERSIONS
    for name in set(FILES.values()):                         # which register their versions when they are imported first
        import_module(f"mpitrain.kernels.device.{name}")
    FILES.clear()
    VERSIONS.clear()
    load = workload(bench, "gpt2 4 x 1024")
    ours = training(bench, load, "float32", graph="off")
    ours.run(2)
    seconds = in_turn(bench, {"ours": ours.launch})["ours"]
    ours.check("baseline")
    yield {"what": "GPT-2 in float32, by expressions", "seconds": seconds, "per_s": load.batch * load.shape[0] / seconds}
    ours.close()
