"""Running statistics of a run on a device: the kernel that normalises records them, and one launch moves them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakegpu import counted, put, xp

from mpitrain import nn
from mpitrain.autograd import Tensor
from mpitrain.backend import Device
from mpitrain.nn.statistics import running_layers
from mpitrain.parallel.gradients.statistics import Statistics


def model() -> nn.Sequential:
    made = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3, momentum=None), nn.InstanceNorm2d(3, track_running_stats=True),
                         nn.spectral_norm(nn.Conv2d(3, 2, 2)), nn.Flatten(), nn.BatchNorm1d(32))
    made.initialize(1, device=Device("gpu", xp))
    made.train()
    return made


def images(seed: int) -> Tensor:
    return Tensor(put((2 * np.random.default_rng(seed).standard_normal((4, 3, 5, 5)) + 1).astype(np.float32)))


class Alike:
    """A channel whose other ranks always have what this one has."""

    def __init__(self, size: int):
        self.size = size

    def allreduce(self, array: np.ndarray[Any, Any], name: str) -> None:
        array *= self.size


@pytest.mark.parametrize("channel", [Alike(1), Alike(2)], ids=["alone", "two ranks"])
def test_running_statistics_of_a_run_on_a_device_have_the_bits_of_sums_kept_apart(channel: Any) -> None:
    """Three steps, one of two micro-batches, and one that is left out, as a step is whose gradient is not finite."""
    together, apart = model(), model()
    statistics = Statistics([together], channel, None)
    nn.defer_statistics(apart)
    for step in range(4):
        for seed in range(step, step + 1 + (step == 1)):
            together(images(seed))
            apart(images(seed))
        found = nn.collect_statistics(apart)
        if step == 2:
            np.testing.assert_array_equal(statistics.total(), found * channel.size)
        else:
            statistics.apply()
            nn.apply_statistics(apart, found)
    statistics.apply()                                        # nothing was recorded: nothing changes
    for (name, ours), (_, theirs) in zip(together.named_buffers(), apart.named_buffers(), strict=True):
        np.testing.assert_array_equal(ours.array.get(), theirs.array.get(), err_msg=name)
    assert together[1].num_batches_tracked.array.get() == 3


def test_a_rank_alone_launches_nothing_to_record_batch_norm_and_once_a_step_to_move_it() -> None:
    made = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    made.initialize(1, device=Device("gpu", xp))
    statistics = Statistics([made], Alike(1), None)
    with counted() as forward:
        made(images(1))
    with counted() as step:
        statistics.apply()
    assert forward.n_launches == 4 and step.n_launches == 1 and not step.syncs and not step.up and not step.down
    made(images(2))
    assert nn.collect_statistics(running_layers(made))[-1] == 1 and not statistics.total().any(), "taken by whom it may concern"
