"""What tests of federations share: a small one on the built-in digits, and the same computed by a few lines of NumPy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.checkpoint.manifest import Checkpoint, load
from mpitrain.config import load_config
from mpitrain.data.keyed import key
from mpitrain.run.session import look_at_files
from mpitrain.train.build.federation import rounds_of
from mpitrain.train.build.inputs import Inputs, inputs_of
from mpitrain.train.build.model import make_model

DIGITS = """
[model]
name = "mlp"
inputs = 64
hidden = []
outputs = 10
[data]
path = "digits"
transform = ["scale"]
[optimizer]
name = "sgd"
lr = 0.25
momentum = 0.0
[train]
steps = 6
batch_size = 8
eval_every = 6
precision = "float64"
[workers]
count = 30
rows = "dirichlet:0.3"
each_round = 6
[[sync]]
over = "workers"
every = "2 epochs"
[log]
every = 1
progress_s = 0
"""


def newest(run: Path) -> Checkpoint:
    return load(sorted((run / "checkpoints").glob("step-*"))[-1])


class Simulated:
    """Softmax regression by federated averaging, in float64, one worker after the other; nothing of the engine is used but who is
    drawn and in which order a worker's rows come."""

    def __init__(self, config: Path, *overrides: str):
        self.config = load_config(config, list(overrides))
        inputs: Inputs = inputs_of(self.config, look_at_files(self.config))
        inputs.transforms.fit(inputs.training, inputs.train_rows)
        self.rounds = rounds_of(self.config, inputs)
        x, self.y = inputs.reader(inputs.transforms).read(np.arange(len(inputs.training), dtype=np.int64))
        self.x = np.concatenate([x.reshape(len(x), -1).astype(np.float64), np.ones((len(x), 1))], axis=1)
        model = make_model(self.config)
        model.initialize(self.config.run.seed, "float64")
        weight, bias = (p.array for p in model.parameters())
        self.theta: NDArray[np.float64] = np.concatenate([weight, bias[:, None]], axis=1)
        self.control, self.controls = np.zeros_like(self.theta), dict[int, Any]()

    def gradient(self, theta: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
        x, y = self.x[rows], self.y[rows]
        scores = x @ theta.T
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        return p.T @ x / len(y)

    def worker(self, worker: int, round: int, mu: float, scaffold: bool, clip: float) -> NDArray[np.float64]:
        """theta_start - theta_worker."""
        r, lr = self.rounds, self.config.optimizer.lr
        plan = r.local.batches(len(r.rows_of[worker]), key(self.config.run.seed, "worker", worker, round))
        theta, own = self.theta.copy(), self.controls.get(worker, np.zeros_like(self.theta))
        for _, places in plan:
            g = self.gradient(theta, r.rows_of[worker][places]) + mu * (theta - self.theta)
            g += (self.control - own) if scaffold else 0.0
            g *= min(1.0, clip / (math.sqrt((g ** 2).sum()) + 1e-6)) if clip else 1.0
            theta -= lr * g
        self.changes[worker] = (self.theta - theta) / (len(plan) * lr) - self.control
        return self.theta - theta

    def run(self, steps: int, *, mu: float = 0.0, scaffold: bool = False, clip: float = 0.0,
            outer: Any = None) -> NDArray[np.float64]:
        """The parameters (10, 65) after so many rounds; `outer(theta, delta)` gives the new ones (default: their mean)."""
        r = self.rounds
        for round in range(steps):
            arrived, self.changes = r.draw.arrived(round), dict[int, Any]()
            sizes = np.array([len(r.rows_of[worker]) for worker in arrived], float)
            weights = sizes / sizes.sum() if r.by_rows else np.full(len(arrived), 1 / max(len(arrived), 1))
            deltas = [self.worker(int(worker), round, mu, scaffold, clip) for worker in arrived]
            delta = sum((w * d for w, d in zip(weights, deltas)), np.zeros_like(self.theta))
            self.theta = self.theta - delta if outer is None else outer(self.theta, delta)
            if scaffold:
                for worker, change in self.changes.items():
                    self.controls[worker] = self.controls.get(worker, 0.0) + change
                self.control = self.control + sum(self.changes.values(), np.zeros_like(self.theta)) / r.draw.count
        return self.theta


def parameters(run: Path, prefix: str = "parameters") -> NDArray[np.float64]:
    """Those of the newest checkpoint, as `Simulated` has them."""
    found = newest(run)
    weight, bias = (found.read(f"{prefix}/{name}") for name in ("head.weight", "head.bias"))
    return np.concatenate([weight, bias[:, None]], axis=1)
