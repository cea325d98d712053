"""The tiny Shakespeare run beside the same model in PyTorch: same initial values, same batches, losses side by side.

    python benchmarks/shakespeare_vs_torch.py FOLDER_OF_SHARDS --steps 2000 --seed 0

Prints the largest relative difference of the training losses over the first 50 steps, the validation losses of both over the
whole held-out tenth at the end, and the median time of a step of each, measured alternately, one thread each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from mpitrain import data, models, nn, optim  # noqa: E402
from mpitrain.autograd import Tensor, no_grad, run_backward  # noqa: E402
from mpitrain.backend import keep_freed_memory  # noqa: E402

LAYERS, HEADS, WIDTH, BLOCK, VOCABULARY, BATCH = 4, 4, 128, 64, 65, 12
LR, MIN_LR, WARMUP, BETAS, DECAY, CLIP = 1e-3, 1e-4, 100, (0.9, 0.99), 0.1, 1.0


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(WIDTH, bias=False)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = torch.nn.LayerNorm(WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(torch.nn.Module):
    """Pre-norm, learned positions, output tied to the token embedding; parameters in the order of ours."""

    def __init__(self):
        super().__init__()
        self.token, self.position = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(BLOCK, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = torch.nn.LayerNorm(WIDTH, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.token.weight.T


def torch_side(state):
    torch.set_num_threads(1)
    model = GPT()
    for (name, parameter), (ours, values) in zip(model.named_parameters(), state.items(), strict=True):
        if tuple(parameter.shape) != values.shape:
            raise SystemExit(f"{name} {tuple(parameter.shape)} is not {ours} {values.shape}")
        parameter.data = torch.tensor(np.array(values))
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
    norm = float(np.sqrt(optim.squared_norm(model.storage, model.storage.gradients)))
    optimizer.update(model.storage.gradients, lr=lr, step=step, scale=optim.clip_factor(norm, CLIP))
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="shards made by `mpitrain data import text`")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    keep_freed_memory()
    dataset = data.open_dataset(data.describe(options.folder))
    training, held_out = data.token_split(dataset, BLOCK, "tail:0.1")
    sampler = data.Sampler(len(training), BATCH, seed=options.seed)
    model = models.gpt(layers=LAYERS, heads=HEADS, width=WIDTH, block=BLOCK, vocabulary=VOCABULARY, dropout=0.0, bias=False)
    model.initialize(options.seed).attach_gradients()
    ours = optim.AdamW(model, lr=LR, betas=BETAS, weight_decay=DECAY, decay="matrices")
    loss_of = nn.LOSSES["cross_entropy"](ignore_index=-1)
    theirs, optimizer = torch_side(model.state_dict())
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
    print(f"largest relative difference of the loss over the first 50 steps: {first:.1e}\n"
          f"validation loss over {count:,} tokens: ours {mine / count:.4f}, PyTorch {other / count:.4f}\n"
          f"median step: ours {statistics.median(a for a, _ in times) * 1e3:.1f} ms, "
          f"PyTorch {statistics.median(b for _, b in times) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
