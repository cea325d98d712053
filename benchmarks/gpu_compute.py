"""Pieces of benchmarks/gpu.py without a model: ceilings, kernels, products, attention, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gpu_tools import Bench, Record, bandwidth_of, bfloat16, distance, drawn, host, in_turn, piece


@piece("ceilings")
def ceilings(bench: Bench) -> Iterator[Record]:
    import torch
    size = bench.size(8192, 32)
    yield {"what": "copy", "bytes_per_s": bandwidth_of(bench)}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        x, y = (torch.randn(size, size, device=bench.torch, dtype=dtype) for _ in range(2))
        seconds = in_turn(bench, {"torch": lambda: x @ y})["torch"]                                     # noqa: B023
        yield {"what": f"torch.matmul {name} {size}^3", "flops_per_s": 2 * size**3 / seconds}


def memory_bound(bench: Bench) -> dict[str, tuple[Callable[[], Any], int]]:
    """Memory-bound kernels at GPT-2's sizes in bfloat16, and the bytes that each must move."""
    from mpitrain.kernels import layer_norm, pointwise, rows
    half, tokens, width, vocabulary = bfloat16(), *bench.size((16 * 1024, 768, 50304), (8, 16, 32))
    x, added = (drawn(bench, tokens, width, dtype=half, seed=i) for i in range(2))
    wide = drawn(bench, tokens, 4 * width, dtype=half)
    slope = bench.xp.empty_like(wide)
    weight, bias = (drawn(bench, width, seed=i) for i in range(2))
    logits = drawn(bench, tokens, vocabulary, dtype=half)
    labels = bench.xp.asarray(np.random.default_rng(0).integers(0, vocabulary, tokens))
    return {"gelu and slope": (lambda: pointwise.ACTIVATIONS["gelu_tanh"].and_slope(wide, slope), 3 * wide.nbytes),
            "add and layer norm": (lambda: layer_norm.row_norm(x, added, weight, bias, 1e-5, True), 4 * x.nbytes),
            "cross entropy": (lambda: rows.cross_entropy(logits, labels, 0.0, None, True), logits.nbytes),
            "softmax": (lambda: rows.softmax(logits), 2 * logits.nbytes)}


@piece("kernels")
def kernels(bench: Bench) -> Iterator[Record]:
    bandwidth = bandwidth_of(bench)
    for name, (work, nbytes) in memory_bound(bench).items():
        seconds = in_turn(bench, {"ours": work})["ours"]
        yield {"what": name, "seconds": seconds, "of_copy": nbytes / seconds / bandwidth}


@piece("products")
def products(bench: Bench) -> Iterator[Record]:
    import torch

    from mpitrain.kernels.product import product
    half, tokens = bfloat16(), bench.size(16 * 1024, 8)
    shapes = ((2304, 768), (768, 768), (3072, 768), (768, 3072), (50304, 768))
    for outputs, inputs in bench.size(shapes, ((24, 8),)):
        sizes = (tokens, inputs), (outputs, inputs), (tokens, outputs)
        x, w, g = (drawn(bench, *shape, dtype=half, seed=i) for i, shape in enumerate(sizes))
        tx, tw, tg = (torch.randn(*shape, device=bench.torch, dtype=torch.bfloat16) for shape in sizes)
        made = {"forward": (lambda: product(x, w.T), lambda: tx @ tw.T, lambda a: (a[0][:64] @ a[1].T, 64)),  # noqa: B023
                "input gradient": (lambda: product(g, w), lambda: tg @ tw, lambda a: (a[2][:64] @ a[1], 64)),  # noqa: B023
                "weight gradient": (lambda: product(g.T, x), lambda: tg.T @ tx, lambda a: (a[2][:, :64].T @ a[0], 64))}  # noqa: B023
        arrays = [host(array) for array in (x, w, g)]
        for what, (ours, theirs, wanted) in made.items():
            some, rows = wanted(arrays)
            wrong = distance(host(ours()[:rows]), some)
            times = in_turn(bench, {"ours": ours, "torch": theirs})
            yield {"what": f"{what} {outputs} x {inputs}", **times, "of_torch": times["torch"] / times["ours"], "distance": wrong}


@piece("attention")
def attention(bench: Bench) -> Iterator[Record]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from mpitrain import Tensor, ops
    heads, size = bench.size((12, 64), (2, 8))
    for length, batch in bench.size(((1024, 16), (4096, 4), (16384, 1)), ((16, 2),)):
        values = drawn(bench, batch, length, 3 * heads * size, dtype=bfloat16())
        qkv = Tensor(values, requires_grad=True)
        grad = drawn(bench, batch, length, heads * size, dtype=bfloat16(), seed=1)
        there = torch.tensor(host(values), device=bench.torch, dtype=torch.bfloat16)
        q, k, v = (part.reshape(batch, length, heads, size).transpose(1, 2).contiguous().requires_grad_()
                   for part in there.split(heads * size, dim=2))
        theirs_grad = torch.randn_like(q)

        def forward() -> Any:
            return ops.self_attention(qkv, heads, causal=True)                                          # noqa: B023

        def ours() -> None:
            qkv.grad = None                                                                             # noqa: B023
            forward().backward(grad)                                                                    # noqa: B023

        def theirs() -> None:
            scaled_dot_product_attention(q, k, v, is_causal=True).backward(theirs_grad)                 # noqa: B023
        wanted = scaled_dot_product_attention(q, k, v, is_causal=True).detach().transpose(1, 2).reshape(batch, length, -1)
        wrong = distance(host(forward().array), wanted.to(torch.float64).cpu().numpy())
        times = in_turn(bench, {"ours": ours, "torch": theirs})
        yield {"what": f"attention, length {length}", **times, "of_torch": times["torch"] / times["ours"], "distance": wrong}


@piece("adamw")
def adamw(bench: Bench) -> Iterator[Record]:
    """One update of GPT-2 with its copy in bfloat16, clipped; beside PyTorch's fused one, which has no copy and clips nothing."""
    import torch

    from mpitrain import models
    from mpitrain.optim import OPTIMIZERS
    from mpitrain.optim.norm import numbers_of_a_step
    from mpitrain.parallel.gradients.norm import GradientNorm
    layers, heads, width, block, vocabulary = bench.size((12, 12, 768, 1024, 50304), (1, 2, 8, 8, 16))
    model = models.gpt(layers, heads, width, block, vocabulary, bias=True)
    storage = model.initialize(seed=1, dtype="bfloat16", device=bench.device)
    optimizer = OPTIMIZERS["adamw"](model, lr=1e-3, weight_decay=0.1)
    norm, numbers, gradients = GradientNorm(storage.segments), numbers_of_a_step(bench.xp), storage.new_flat()
    gradients[...] = 1e-3

    def ours() -> None:
        optimizer.update(gradients, lr=1e-3, step=1, numbers=numbers)
    parameters = [torch.nn.Parameter(torch.zeros(p.shape, device=bench.torch)) for p in model.parameters()]
    for p in parameters:
        p.grad = torch.full_like(p, 1e-3)
    theirs = torch.optim.AdamW(parameters, fused=True)
    norm.conclude(gradients, numbers, 1.0)
    before = host(storage.values)
    ours()
    moved = float((host(storage.values) != before).mean())    # gaps between parameters are not
    sides = {"update": ours, "norm": lambda: norm.conclude(gradients, numbers, 1.0), "torch": theirs.step}
    times = in_turn(bench, sides)
    yield {"what": f"AdamW of {storage.size} numbers", "moved": moved, **{f"{side}_s": time for side, time in times.items()}}
