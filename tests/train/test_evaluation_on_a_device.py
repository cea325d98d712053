"""An evaluation on the stand-in for a GPU: the metrics of the host, and one wait for all chunks together."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from fakegpu import counted, put

from mpitrain import nn
from mpitrain.autograd import Tensor
from mpitrain.train.evaluate import Evaluator

CHUNKS = [(np.random.default_rng(i).standard_normal((n, 4)), np.arange(n) % 4) for i, n in enumerate((5, 5, 3))]


def evaluator(move: Callable[[Any], Any]) -> Evaluator:
    alone: Any = SimpleNamespace(mesh=SimpleNamespace(place=0, n_places=1), counts=True, classes=lambda x: x.argmax(axis=-1),
                                 control=SimpleNamespace(rank=0, allreduce=lambda *_, **__: None),
                                 placement=SimpleNamespace(in_step=False))
    model: Any = SimpleNamespace(run=lambda batches: ((Tensor(move(x)), y) for x, y in batches),
                                 feed=SimpleNamespace(targets=move, part=lambda y: y))
    return Evaluator(model, nn.LOSSES["cross_entropy"](), CHUNKS.__getitem__, len(CHUNKS), alone, cuts_parameters=False)


def test_metrics_are_those_of_the_host_and_all_chunks_are_waited_for_once() -> None:
    wanted, there = evaluator(np.asarray).run(), evaluator(put)
    with counted() as counts:
        found = there.run()
    assert counts.syncs == {"get": 1} and found.keys() == wanted.keys() == {"loss", "accuracy"}
    assert found["accuracy"] == wanted["accuracy"] and abs(found["loss"] - wanted["loss"]) < 1e-12
