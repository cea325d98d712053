"""Loss scaling on real ranks: what one of them finds all of them skip, and their scales stay alike."""

from __future__ import annotations

import numpy as np
import pytest
from device_on_host import compiler
from fakegpu import put, xp
from policy_setup import initialised

from mpitrain import nn, optim
from mpitrain.autograd import Tensor, run_backward
from mpitrain.backend import Device
from mpitrain.comm.messages.channel import Channel
from mpitrain.kernels.optimizer import FOUND, NORM
from mpitrain.nn import FlatStorage, Parameter
from mpitrain.parallel.gradients.norm import GradientNorm
from mpitrain.parallel.gradients.replicas import checksum
from mpitrain.parallel.policies.loss_scale import LossScale
from mpitrain.parallel.policies.replicated import Replicated


def test_an_infinite_gradient_on_one_rank_is_skipped_by_all_and_halves_every_scale(comm):
    channel = Channel(comm.Dup(), "test")
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    policy = initialised(Replicated, model, channel, clip_norm=1.0)
    policy.open(optim.AdamW(policy.storage, lr=0.1), lambda step: 0.1)
    policy.loss_scale = LossScale(np, interval=2)
    scales = []
    for step in range(6):
        before = policy.values.copy()
        policy.begin()
        policy.reducer.begin_micro_batch(last=True)
        y = model(Tensor(np.random.default_rng([channel.rank, step]).standard_normal((2, 3)).astype(np.float32)))
        grad = policy.loss_scale.scale(np.ones(y.shape, np.float32))
        if step in (1, 4) and channel.rank == step % channel.size:
            grad[0, 0] = np.inf
        with np.errstate(invalid="ignore"):
            run_backward(y, grad)
            policy.finish()
        assert (policy.values == before).all() == (step in (1, 4))
        scales.append(float(policy.loss_scale.record()["scale"]))
    assert scales == [65536.0, 32768.0, 32768.0, 65536.0, 32768.0, 32768.0]
    assert len(set(channel.gather_objects(checksum({"values": policy.values})))) == 1
    channel.close()


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_ranks_with_parts_of_a_model_on_devices_find_the_same_numbers(comm):
    channel = Channel(comm.Dup(), "test")
    parameter = Parameter((5000 + channel.rank,), nn.init.zeros)
    parameter.name = f"part{channel.rank}"
    storage = FlatStorage([parameter], "float32", Device("gpu", xp))
    norm, scale = GradientNorm(storage.segments, channel=channel), LossScale(xp)
    flat = np.random.default_rng(channel.rank).standard_normal(storage.size).astype(np.float32)
    for value in (1.0, np.nan):
        flat[77] = value if channel.rank == channel.size - 1 else 1.0
        found = scale.finish(norm, put(flat), 1.0).get()
        everyone = channel.gather_objects(found.tolist())
        assert len({str(one) for one in everyone}) == 1
        assert found[FOUND] == np.isnan(value) == np.isnan(found[NORM])
    channel.close()
