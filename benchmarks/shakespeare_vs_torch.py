"""The tiny Shakespeare run beside the same model in PyTorch: same initial values, same batches, losses side by side.

    python benchmarks/shakespeare_vs_torch.py FOLDER_OF_SHARDS --steps 2000 --seed 0

Prints the largest relative difference of the training losses over the first 50 steps, the validation losses of both over the
whole held-out tenth at the end, and the time of a step and of all steps of each, measured alternately, one thread each.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pinned  # noqa: F401  (first: it sets what NumPy and PyTorch read)

# isort: split
import numpy as np
import torch
import torch_side
from torch.nn import functional as F

from mpitrain import data, models, nn, optim
from mpitrain.autograd import Tensor, no_grad, run_backward
from mpitrain.backend import keep_freed_memory
from mpitrain.bench.pairs import Pairs
from mpitrain.bench.report import Report, in_time, ratio_of

LAYERS, HEADS, WIDTH, BLOCK, VOCABULARY, BATCH = 4, 4, 128, 64, 65, 12
LR, MIN_LR, WARMUP, BETAS, DECAY, CLIP = 1e-3, 1e-4, 100, (0.9, 0.99), 0.1, 1.0


def in_torch(state):
    """The same model in PyTorch, and its optimizer."""
    torch.set_num_threads(1)
    model = torch_side.GPT(LAYERS, HEADS, WIDTH, BLOCK, VOCABULARY)
    torch_side.set_parameters(model, list(state.values()))
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
                                  lr=LR, betas=BETAS, fused=True)
    return model, optimizer


def torch_step(model, optimizer, x, y, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(torch.from_numpy(x)).view(-1, VOCABULARY), torch.from_numpy(y).reshape(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return float(loss.detach())


def our_step(model, optimizer, loss_of, x, y, lr, step):
    optimizer.zero_grad()
    loss = loss_of(model(Tensor(x)), y)
    value = float(loss.array) / y.size
    run_backward(loss, np.asarray(1 / y.size, np.float32))
    norm = float(np.sqrt(optim.squared_norm(model.storage.segments, model.storage.gradients)))
    optimizer.update(model.storage.gradients, lr=lr, step=step, scale=optim.clip_factor(norm, CLIP))
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="shards made by `mpitrain data import text`")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = Report(0, options.json)
    keep_freed_memory()
    dataset = data.Dataset(data.describe(options.folder))
    training, held_out = data.token_split(dataset, BLOCK, "tail:0.1")
    sampler = data.Sampler(len(training), BATCH, seed=options.seed)
    model = models.gpt(layers=LAYERS, heads=HEADS, width=WIDTH, block=BLOCK, vocabulary=VOCABULARY, dropout=0.0, bias=False)
    model.initialize(options.seed).attach_gradients()
    ours = optim.AdamW(model, lr=LR, betas=BETAS, weight_decay=DECAY, decay="matrices")
    loss_of = nn.LOSSES["cross_entropy"](ignore_index=-1)
    theirs, optimizer = in_torch(model.state_dict())
    rate = optim.schedule("cosine", lr=LR, min_lr=MIN_LR, warmup_steps=WARMUP, total_steps=options.steps)

    losses, times = [], []
    for step in range(options.steps):
        x, y = training.read(sampler.rows(step))
        t0 = time.perf_counter()
        a = our_step(model, ours, loss_of, x, y, rate(step), step + 1)
        t1 = time.perf_counter()
        b = torch_step(theirs, optimizer, x, y, rate(step))
        times.append((t1 - t0, time.perf_counter() - t1))
        losses.append((a, b))
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}  ours {a:.4f}  PyTorch {b:.4f}", flush=True)
    first = max(abs(a - b) / b for a, b in losses[:50])
    mine, other, count = 0.0, 0.0, 0
    with no_grad(), torch.no_grad():
        for _, rows in data.chunks(range(len(held_out)), 256):
            x, y = held_out.read(rows)
            mine += float(loss_of(model(Tensor(x)), y).array)
            other += float(F.cross_entropy(theirs(torch.from_numpy(x)).view(-1, VOCABULARY), torch.from_numpy(y).reshape(-1),
                                           ignore_index=-1, reduction="sum"))
            count += int((y >= 0).sum())
    pairs = Pairs(*map(list, zip(*times)))
    result = pairs.summary("torch")
    report.record({"bench": "shakespeare_vs_torch", **result, "steps": options.steps, "seed": options.seed,
                   "loss": mine / count, "torch_loss": other / count, "loss_difference": first,
                   "wall_seconds": sum(pairs.ours), "torch_wall_seconds": sum(pairs.theirs)})
    print(f"largest relative difference of the loss over the first 50 steps: {first:.1e}\n"
          f"validation loss over {count:,} tokens: ours {mine / count:.4f}, PyTorch {other / count:.4f}\n"
          f"median step: ours {in_time(result['seconds'])}, PyTorch {in_time(result['torch_seconds'])}, times faster "
          f"{ratio_of(result)}\n"
          f"wall time of {options.steps} steps: ours {sum(pairs.ours):.1f} s, PyTorch {sum(pairs.theirs):.1f} s, "
          f"{sum(pairs.theirs) / sum(pairs.ours):.2f} times")


if __name__ == "__main__":
    main()
