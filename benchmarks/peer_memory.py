"""One side of `train_vs_peers.py --memory`: trains a few steps in this process and prints its memory as a JSON line.

    python benchmarks/peer_memory.py eager|compiled|jax|ours MODEL GIVEN.npz STEPS

GIVEN.npz has a batch x, y and initial parameters value0, value1, ... . "Before" is with everything imported and nothing built. A
side imports what it needs and nothing of the others.
"""

from __future__ import annotations

import json
import sys

import pinned  # noqa: F401  (first: it sets what NumPy, PyTorch and JAX read)

# isort: split
import numpy as np

from mpitrain.backend.memory import resident  # which imports little else of ours

LR, DECAY = 1e-3, 0.01


def main() -> None:
    side, model, path, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    if side == "ours":
        from mpitrain.backend import keep_freed_memory
        from mpitrain.bench.train import Training
        from mpitrain.bench.workloads import WORKLOADS
        from mpitrain.comm.job.start import start
        keep_freed_memory()
        world = start()
    elif side == "jax":
        import jax_side
    else:
        import torch_side
    before = resident() / 2**20
    with np.load(path) as given:
        batches = [(given["x"], given["y"])]
        values = [given[f"value{i}"] for i in range(len(given.files) - 2)] if side == "jax" else None
    if side == "ours":
        trained = Training(WORKLOADS[model], world.comm)
    elif side == "jax":
        trained = jax_side.JaxSide(jax_side.MODELS[model], batches, values, lr=LR, decay=DECAY)
        del values
    else:
        trained = torch_side.TorchSide(torch_side.MODELS[model](), batches, lr=LR, decay=DECAY, compiled=side == "compiled")
    for _ in range(steps):
        trained.step()
    peak = resident(peak=True) / 2**20
    print(json.dumps({"side": side, "before_mb": before, "peak_mb": peak, "more_mb": peak - before, "steps": steps}))


if __name__ == "__main__":
    main()
