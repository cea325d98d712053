"""Everything that only a GPU can show, in pieces of at most some minutes, beside PyTorch on the same GPU in the same run.

    make bench-gpu                              or    python benchmarks/gpu.py --json FILE [PIECE ...]
    python benchmarks/gpu.py --list             the pieces, and what each must show

Each piece appends its records to FILE and is left out when FILE has them already, so a run that was cut off goes on. Times are of
device events or of many steps between two waits; sides take turns, three rounds, medians. Inputs are drawn anew. What is computed
is checked in the same run. PyTorch: fused AdamW, bfloat16 by autocast, channels_last for images, eager and compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain import models
from mpitrain.backend import Device, select_device
from mpitrain.bench.train import DECAY, LR, WARM_UP, Training
from mpitrain.bench.workloads import Workload, of_transformer, residual
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import start

ROUNDS, LEAST_S = 3, 0.5
Record = dict[str, Any]
Piece = Callable[[Device], Iterator[Record]]
PIECES: dict[str, tuple[str, Piece]] = {}


def piece(name: str, shows: str) -> Callable[[Piece], Piece]:
    def register(function: Piece) -> Piece:
        PIECES[name] = shows, function
        return function
    return register


def seconds_of(device: Device, work: Callable[[], Any], least: float = LEAST_S) -> float:
    """Seconds of one call, by events around as many as take `least`."""
    cuda = device.xp.cuda
    work()
    device.synchronize()
    began = time.perf_counter()
    work()
    device.synchronize()
    count = max(1, min(1000, int(least / max(time.perf_counter() - began, 1e-6))))
    first, last = cuda.Event(), cuda.Event()
    first.record()
    for _ in range(count):
        work()
    last.record()
    last.synchronize()
    return float(cuda.get_elapsed_time(first, last)) / 1e3 / count


def in_turn(device: Device, sides: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each side over rounds in which they take turns."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, work in sides.items():
            found[name].append(seconds_of(device, work))
    return {name: statistics.median(times) for name, times in found.items()}


def drawn(device: Device, *shape: int, dtype: Any = "float32", seed: int = 0) -> Any:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return device.xp.asarray(values).astype(dtype)


def bfloat16() -> Any:
    import ml_dtypes
    return np.dtype(ml_dtypes.bfloat16)


def distance(found: Any, wanted: Any) -> float:
    a, b = (np.asarray(x, np.float64) for x in (found, wanted))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def bandwidth_of(device: Device) -> float:
    """Bytes a second that a copy of 1 GiB reads and writes."""
    source = drawn(device, 1 << 28)
    target = device.xp.empty_like(source)
    return 2 * source.nbytes / seconds_of(device, lambda: device.xp.copyto(target, source))


@piece("ceilings", "a copy's bytes a second; products of bfloat16 and float32 a second")
def ceilings(device: Device) -> Iterator[Record]:
    import torch
    yield {"what": "copy", "bytes_per_s": bandwidth_of(device)}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        x, y = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
        yield {"what": f"torch.matmul {name} 8192^3", "flops_per_s": 2 * 8192**3 / seconds_of(device, lambda: x @ y)}  # noqa: B023


def workload(name: str) -> Workload:
    """Of the sizes that the bars name."""
    def gpt(layers: int, heads: int, width: int, batch: int) -> Workload:
        return Workload(lambda: models.gpt(layers, heads, width, 1024, 50304, bias=True, activation="gelu_tanh"), batch, (1024,),
                        50304, of_transformer(layers, width, 1024, 50304), tokens=True)

    def images(make: Callable[[], Any], batch: int, size: int, classes: int, products: int) -> Workload:
        return Workload(make, batch, (3, size, size), classes, 6 * products)
    return {"gpt2 16 x 1024": lambda: gpt(12, 12, 768, 16), "gpt2 64 x 1024": lambda: gpt(12, 12, 768, 64),
            "gpt 1.5B": lambda: gpt(48, 25, 1600, 8),
            "resnet20 128": lambda: images(models.resnet20, 128, 32, 10, sum(residual(32, 16, 16, 3)) * 3),
            "resnet20 1024": lambda: images(models.resnet20, 1024, 32, 10, sum(residual(32, 16, 16, 3)) * 3),
            "resnet18 256": lambda: images(models.MODELS["resnet18"], 256, 224, 1000, 1_814_073_344),
            "resnet50 256": lambda: images(models.MODELS["resnet50"], 256, 224, 1000, 4_089_184_256)}[name]()


def steps_beside_torch(name: str, device: Device) -> Iterator[Record]:
    """A training step in bfloat16 beside PyTorch's, eager and compiled, from the same values on the same batches."""
    import torch
    import torch_gpu
    load = workload(name)
    ours = Training(load, start().comm, sections={"train": {"device": "gpu", "precision": "bfloat16"}})
    values = [np.asarray(device.xp.asnumpy(p.master)) for p in ours.model.parameters()]
    ours.run(WARM_UP)
    first = ours.first_and_last()[0]
    pool = device.xp.get_default_memory_pool()
    sides: dict[str, Callable[[], Any]] = {"ours": ours.launch}
    memory = {"ours": pool.total_bytes()}
    for compiled in (False, True):
        side = torch_gpu.side(name, ours.batches, values, compiled=compiled, lr=LR, decay=DECAY)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM_UP):
            side.step()
        sides["compiled" if compiled else "eager"] = side.step
        memory["compiled" if compiled else "eager"] = torch.cuda.max_memory_allocated()
        if not compiled:
            yield {"what": f"{name}: first losses", "ours": first, "torch": torch_gpu.first_loss(side)}
    times = in_turn(device, sides)
    ours.check(name)
    per_sample = load.shape[0] if load.tokens else 1
    yield {"what": name, **{f"{side}_s": seconds for side, seconds in times.items()},
           "per_s": load.batch * per_sample / times["ours"], "of_compiled": times["compiled"] / times["ours"],
           "of_eager": times["eager"] / times["ours"], "tflops": load.flops / times["ours"] / 1e12,
           **{f"{side}_bytes": size for side, size in memory.items()}}
    ours.close()


STEPS = {"gpt2 16 x 1024": ">= 0.90 of compiled, >= 1.3 of eager", "gpt2 64 x 1024": ">= 0.90 of compiled, >= 1.3 of eager",
         "gpt 1.5B": ">= 0.92 of compiled", "resnet20 128": ">= 1.5 of eager", "resnet20 1024": ">= 1.5 of eager",
         "resnet18 256": ">= 0.85 of compiled", "resnet50 256": ">= 0.85 of compiled"}
for _name, _shows in STEPS.items():
    piece(_name, _shows)(partial(steps_beside_torch, _name))


def kinds_of_kernels(device: Device) -> dict[str, tuple[Callable[[], Any], int]]:
    """Memory-bound kernels at GPT-2's sizes in bfloat16, and the bytes that each must move."""
    from mpitrain.kernels import layer_norm, pointwise, rows
    half, tokens, width, vocabulary = bfloat16(), 16 * 1024, 768, 50304
    x, added = (drawn(device, tokens, width, dtype=half, seed=i) for i in range(2))
    wide = drawn(device, tokens, 4 * width, dtype=half)
    slope = device.xp.empty_like(wide)
    weight, bias = (drawn(device, width, seed=i) for i in range(2))
    logits = drawn(device, tokens, vocabulary, dtype=half)
    labels = device.xp.asarray(np.random.default_rng(0).integers(0, vocabulary, tokens))
    return {"gelu and slope": (lambda: pointwise.ACTIVATIONS["gelu_tanh"].and_slope(wide, slope), 3 * wide.nbytes),
            "add and layer norm": (lambda: layer_norm.row_norm(x, added, weight, bias, 1e-5, True), 4 * x.nbytes),
            "cross entropy": (lambda: rows.cross_entropy(logits, labels, 0.0, None, True), logits.nbytes),
            "softmax": (lambda: rows.softmax(logits), 2 * logits.nbytes)}


@piece("kernels", ">= 0.8 of a copy's bandwidth")
def kernels(device: Device) -> Iterator[Record]:
    bandwidth = bandwidth_of(device)
    for name, (work, nbytes) in kinds_of_kernels(device).items():
        seconds = statistics.median(seconds_of(device, work) for _ in range(ROUNDS))
        yield {"what": name, "seconds": seconds, "of_copy": nbytes / seconds / bandwidth}


@piece("products", ">= 0.95 of torch.matmul at the same shapes")
def products(device: Device) -> Iterator[Record]:
    import torch

    from mpitrain.kernels.product import product
    half, tokens = bfloat16(), 16 * 1024
    for outputs, inputs in ((2304, 768), (768, 768), (3072, 768), (768, 3072), (50304, 768)):
        x, w, g = (drawn(device, *shape, dtype=half) for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
        tx, tw, tg = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
                      for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs)))
        made, some, all_of_w = (device.xp.asnumpy(a.astype("float32")).astype("float64")
                                for a in (product(x[:64], w.T), x[:64], w))
        wrong = distance(made, some @ all_of_w.T)
        for what, ours, theirs in (("forward", lambda: product(x, w.T), lambda: tx @ tw.T),             # noqa: B023
                                   ("input gradient", lambda: product(g, w), lambda: tg @ tw),         # noqa: B023
                                   ("weight gradient", lambda: product(g.T, x), lambda: tg.T @ tx)):   # noqa: B023
            times = in_turn(device, {"ours": ours, "torch": theirs})
            yield {"what": f"{what} {outputs} x {inputs}", **times, "of_torch": times["torch"] / times["ours"], "distance": wrong}


@piece("attention", ">= 0.95 of torch's scaled_dot_product_attention")
def attention(device: Device) -> Iterator[Record]:
    import torch

    from mpitrain import Tensor, ops
    for length, batch in ((1024, 16), (4096, 4), (16384, 1)):
        qkv = Tensor(drawn(device, batch, length, 3 * 768, dtype=bfloat16()), requires_grad=True)
        grad = drawn(device, batch, length, 768, dtype=bfloat16(), seed=1)
        q, k, v = (torch.randn(batch, 12, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        theirs_grad = torch.randn_like(q)

        def ours() -> None:
            qkv.grad = None                                                                             # noqa: B023
            ops.self_attention(qkv, 12, causal=True).backward(grad)                                     # noqa: B023

        def theirs() -> None:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).backward(theirs_grad)     # noqa: B023
        times = in_turn(device, {"ours": ours, "torch": theirs})
        yield {"what": f"attention, length {length}", **times, "of_torch": times["torch"] / times["ours"]}


@piece("repeated", "equal bits when run twice, and losses of the host within 1e-3 in float32")
def repeated(device: Device) -> Iterator[Record]:
    from mpitrain.bench.workloads import WORKLOADS
    curves = {}
    for name in ("gpu", "gpu again", "cpu"):
        training = Training(WORKLOADS["gpt-nano"], start().comm, sections={"train": {"device": name.split()[0]}})
        training.run(200 if name != "cpu" else 50)
        curves[name] = [float(loss) for loss in training.losses]
        training.close()
    worst = max(abs(a - b) / b for a, b in zip(curves["gpu"], curves["cpu"]))
    yield {"what": "gpt-nano, 200 steps", "equal": curves["gpu"] == curves["gpu again"], "from_host": worst}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pieces", nargs="*", help="default: all")
    parser.add_argument("--json", type=Path, default=Path("gpu.jsonl"))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seconds", type=float, default=540.0, help="no piece is begun after so many (default: %(default)s)")
    options = parser.parse_args()
    unknown = [name for name in options.pieces if name not in PIECES]
    if options.list or unknown:
        print("\n".join(f"{name:16} {shows}" for name, (shows, _) in PIECES.items()))
        sys.exit(f"gpu.py knows no {', '.join(unknown)}" if unknown else 0)
    device, began = select_device("gpu"), time.perf_counter()
    done = {json.loads(line)["piece"] for line in options.json.read_text().splitlines()} if options.json.exists() else set()
    for name in options.pieces or PIECES:
        if name in done or time.perf_counter() - began > options.seconds:
            continue
        found = [{"piece": name, **record} for record in PIECES[name][1](device)]
        with options.json.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in found)
        for record in found:
            words = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in record.items()]
            print("  ".join(words), flush=True)
        device.xp.get_default_memory_pool().free_all_blocks()
    return 0


if __name__ == "__main__":
    Process().run(main)
