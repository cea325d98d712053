"""Captured steps of several ranks, with batch norm: the bits of the same steps uncaptured, exchanged while the device computes.

The stand-in's graphs compute at each launch alone (device_graphs): what left for another rank too early would be poison.
"""

from __future__ import annotations

from typing import Any

import fakegpu
import numpy as np
import pytest
from device_graphs import Graph

from mpitrain import nn
from mpitrain.backend import namespace
from mpitrain.bench.train import Training
from mpitrain.bench.workloads import Workload
from mpitrain.errors import ConfigError
from mpitrain.parallel.gradients.reducer import GradientReducer


def net(norm: Any = nn.BatchNorm2d) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm(4, momentum=None), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10),
                         nn.BatchNorm1d(10), nn.GELU(), nn.Linear(10, 5))


def training(comm: Any, graph: str, micro_batches: int, norm: Any = nn.BatchNorm2d, **exchange: Any) -> Training:
    return Training(Workload(lambda: net(norm), 3 * micro_batches, (2, 6, 6), 5, 1), comm, sections={
        "train": {"device": "gpu", "graph": graph, "micro_batches": micro_batches * comm.size},
        "optimizer": {"clip_norm": 1.0}, "comm": {"bucket_mb": 0.0002, **exchange}})


@pytest.fixture(autouse=True)
def on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "_cupy", lambda: (fakegpu.xp, ""))


@pytest.mark.parametrize(("library", "micro_batches"), [("mpi", 2), ("nccl", 1), ("ipc", 1)])
def test_captured_steps_of_several_ranks_have_the_bits_of_the_same_steps_uncaptured(
        comm: Any, monkeypatch: pytest.MonkeyPatch, library: str, micro_batches: int) -> None:
    """Losses, parameters and running statistics; a bucket leaves before the next part of backward is launched."""
    if library == "ipc":
        monkeypatch.setenv("MPITRAIN_FAKE_BUS", "0")
    told: list[str] = []
    start, launch = GradientReducer._launch, Graph.launch
    monkeypatch.setattr(GradientReducer, "_launch", lambda self, *given: [told.append("bucket"), start(self, *given)][1])
    monkeypatch.setattr(Graph, "launch", lambda self, *given: [told.append("graph"), launch(self, *given)][1])
    found = []
    for graph in ("on", "off"):
        run = training(comm, graph, micro_batches, **({"library": library} if comm.size > 1 else {}))
        run.run(4)
        told.clear()
        run.launch()
        last = [*told]
        if graph == "on" and comm.size > 1:
            n = len(run.job.policy.reducer.buckets)
            assert n >= 3 and last == ["graph"] * (micro_batches - 1) + ["graph", "bucket"] * n
        assert graph == "on" or "graph" not in last
        if graph == "on" and comm.size == 1:
            assert last == ["graph"] * micro_batches
        leaves = [*run.model.parameters(), *(buffer for _, buffer in run.model.named_buffers())]
        found.append(([float(loss) for loss in run.losses], [leaf.master.get() for leaf in leaves]))
        run.close()
    assert found[0][0] == found[1][0] and len({*found[0][0]}) > 1
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_ranks_that_compute_together_or_reuse_gradients_are_not_captured(comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("one rank has nobody to compute with")
    for options, said in (({"norm": nn.SyncBatchNorm}, "statistics of synchronised batch norm"),
                          ({"sharding": "gradients"}, "the memory of a bucket of gradients is another one's")):
        with pytest.raises(ConfigError, match=said):
            training(comm, "on", 1, **options)
