"""One rank's training step beside PyTorch's: same model, same data, one thread each, alternately in one process.

    make bench            or    python benchmarks/train_vs_torch.py --rounds 15

A step is forward, loss, backward, AdamW update (PyTorch: eager, fused AdamW). Pairs are timed A B A B; the ratio is the median
over pairs of PyTorch's time over ours. Both train from the same initial values on the same batches, and the losses are
compared in the same run: a fast wrong step would be refused.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):          # a forced kernel would halve one side's speed
    if os.environ.pop(name, None):
        raise SystemExit(f"unset {name} and start again: NumPy has read it by now")
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402

from mpitrain import models, nn, optim  # noqa: E402
from mpitrain.autograd import Tensor, run_backward  # noqa: E402
from mpitrain.backend import keep_freed_memory  # noqa: E402
from mpitrain.parallel.reducer import GradientReducer  # noqa: E402

BATCH, SIZES = 128, (784, 1024, 1024, 10)


class Alone:
    """A channel of one rank: nothing to exchange."""

    size = 1

    def start_allreduce(self, array, name):
        raise AssertionError("one rank exchanges nothing")


class Ours:
    def __init__(self):
        self.model = models.mlp(SIZES[0], list(SIZES[1:-1]), SIZES[-1])
        self.storage = self.model.initialize(seed=0)
        self.reducer = GradientReducer(self.storage, Alone())
        self.optimizer = optim.AdamW(self.storage, lr=1e-3, weight_decay=0.01)
        self.loss, self.steps = nn.LOSSES["cross_entropy"](), 0

    def step(self, x, y):
        self.reducer.begin()
        loss = self.loss(self.model(Tensor(x)), y)
        value = float(loss.array) / len(y)
        self.reducer.begin_micro_batch(last=True)
        run_backward(loss, np.asarray(1 / len(y), np.float32), progress=None)
        self.steps += 1
        self.optimizer.update(self.reducer.finish(), lr=1e-3, step=self.steps)
        return value


class Theirs:
    def __init__(self, state):
        torch.set_num_threads(1)
        layers = []
        for a, b in zip(SIZES, SIZES[1:]):
            layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*layers[:-1])
        for parameter, values in zip(self.model.parameters(), state.values()):
            parameter.data = torch.tensor(np.array(values))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)

    def step(self, x, y):
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(self.model(torch.from_numpy(x)), torch.from_numpy(y))
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def time_steps(side, batches) -> tuple[float, list[float]]:
    began = time.perf_counter()
    losses = [side.step(x, y) for x, y in batches]
    return (time.perf_counter() - began) / len(batches), losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--steps", type=int, default=2, help="in a timed block: few, as a shared machine changes its speed")
    parser.add_argument("--json", help="append the result to this file")
    options = parser.parse_args()
    keep_freed_memory()                                          # as `mpitrain train` does; it serves PyTorch's malloc too
    rng = np.random.default_rng(0)
    batches = [(rng.standard_normal((BATCH, SIZES[0]), dtype=np.float32), rng.integers(0, 10, BATCH))
               for _ in range(options.steps)]
    ours = Ours()
    theirs = Theirs(ours.model.state_dict())
    pairs, worst = [], 0.0
    for i in range(options.rounds + 5):                          # five rounds to warm up
        a, losses_a = time_steps(ours, batches)
        b, losses_b = time_steps(theirs, batches)
        if i == 0:
            worst = max(abs(p - q) / abs(q) for p, q in zip(losses_a, losses_b))
        if i >= 5:
            pairs.append((a, b))
    if worst > 1e-4:
        raise SystemExit(f"the losses of the first steps differ by {worst:.1e}: the two sides do not train the same model")
    ratios = sorted(b / a for a, b in pairs)
    result = {"bench": "train", "model": "mlp", "batch": BATCH, "threads": 1, "seconds": statistics.median(a for a, _ in pairs),
              "torch_seconds": statistics.median(b for _, b in pairs), "ratio": statistics.median(ratios),
              "ratio_low": ratios[len(ratios) // 4], "ratio_high": ratios[3 * len(ratios) // 4], "loss_difference": worst,
              "torch": torch.__version__, "numpy": np.__version__}
    print(f"MLP {'-'.join(map(str, SIZES))}, batch {BATCH}, one thread, {options.rounds} pairs of {options.steps} steps\n"
          f"  ours     {result['seconds'] * 1e3:7.2f} ms/step\n"
          f"  PyTorch  {result['torch_seconds'] * 1e3:7.2f} ms/step (eager, fused AdamW)\n"
          f"  ratio    {result['ratio']:.2f} (quartiles {result['ratio_low']:.2f} .. {result['ratio_high']:.2f}); "
          f"losses differ by {worst:.1e}")
    if options.json:
        with open(options.json, "a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
