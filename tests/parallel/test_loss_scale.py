"""Dynamic loss scaling: PyTorch's sequence of skipped steps and scales, decided on the device, kept in checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
from device_on_host import compiler
from fakegpu import put, runtime, xp
from test_update import build

from mpitrain import nn
from mpitrain.autograd import Tensor, run_backward
from mpitrain.backend import Device, asnumpy
from mpitrain.checkpoint.state import State
from mpitrain.errors import ConfigError
from mpitrain.kernels.optimizer import FOUND, SCALE
from mpitrain.nn import FlatStorage, Parameter
from mpitrain.optim import SGD, Adam, AdamW
from mpitrain.optim.elementwise import NAdam
from mpitrain.parallel.gradients.norm import GradientNorm
from mpitrain.parallel.policies.loss_scale import LossScale

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
N, STEPS = 5000, 50
KEPT = {"loss_scale/scale", "loss_scale/good", "loss_scale/left_out"}


def overflows(seed, rate):
    return np.random.default_rng(seed).random(STEPS) < rate


@pytest.mark.parametrize("where", [xp, np], ids=["stand-in", "host"])
@pytest.mark.parametrize(("seed", "rate", "interval", "clip"), [
    (0, 0.3, 3, 0.0), (1, 0.1, 5, 0.5), (2, 0.0, 1, 0.0), (3, 0.9, 2, 0.0)])
def test_scales_skips_and_weights_of_50_steps_are_those_of_grad_scaler(where, seed, rate, interval, clip):
    planted, rng, begin = overflows(seed, rate), np.random.default_rng(seed), np.linspace(-1, 1, N, dtype=np.float32)
    w = torch.nn.Parameter(torch.tensor(begin))
    theirs, scaler = torch.optim.SGD([w], lr=0.1, momentum=0.9), torch.amp.GradScaler("cpu", init_scale=2.0**10,
                                                                                      growth_interval=interval)
    parameter = Parameter((N,), nn.init.zeros)
    parameter.name = "w"
    storage = FlatStorage([parameter], "float32", Device("gpu", where))
    storage.values[...] = where.asarray(np.append(begin, np.zeros(storage.size - N, np.float32)))
    ours, norm = SGD(storage, 0.1, momentum=0.9), GradientNorm(storage.segments)
    scale = LossScale(where, initial=2.0**10, interval=interval)
    for step in range(STEPS):
        slope = rng.standard_normal(N).astype(np.float32)
        slope[17] = np.inf if planted[step] else slope[17]
        before = w.detach().clone()
        scaler.scale((w * torch.tensor(slope)).sum()).backward()
        scaler.unscale_(theirs)
        if clip:
            torch.nn.utils.clip_grad_norm_([w], clip)
        scaler.step(theirs)
        scaler.update()
        theirs.zero_grad()
        skipped = bool((before == w).all())

        start = scale.scale(where.asarray(np.asarray(1.0, np.float32)))
        assert start.dtype == np.float32
        flat = storage.new_flat()
        flat[:N] = where.asarray(slope) * start
        numbers = scale.finish(norm, flat, clip)
        ours.update(flat, lr=0.1, step=step + 1, numbers=numbers)
        assert (asnumpy(numbers)[FOUND] == 1) == skipped == planted[step]
        assert asnumpy(numbers)[SCALE] == scaler.get_scale() and int(scale.record()["good"]) == scaler._get_growth_tracker()
        np.testing.assert_allclose(asnumpy(storage.values)[:N], w.detach().numpy(), rtol=1e-5, atol=1e-6)


RULES = {"adamw": (lambda w: torch.optim.AdamW(w, lr=0.01), lambda w: AdamW(w, 0.01)),
         "amsgrad": (lambda w: torch.optim.Adam(w, lr=0.01, amsgrad=True), lambda w: Adam(w, 0.01, amsgrad=True)),
         "dampened": (lambda w: torch.optim.SGD(w, lr=0.01, momentum=0.9, dampening=0.5),
                      lambda w: SGD(w, 0.01, momentum=0.9, dampening=0.5)),
         "nadam": (lambda w: torch.optim.NAdam(w, lr=0.01), lambda w: NAdam(w, 0.01))}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("where", [xp, np], ids=["stand-in", "host"])
def test_steps_that_are_left_out_do_not_count_for_the_optimizer_as_with_grad_scaler(where, rule):
    """50 steps of one parameter, 15 of them planted, the first ones among them; resumed at step 25 in another optimizer."""
    planted, rng, begin = overflows(0, 0.3), np.random.default_rng(0), np.linspace(-1, 1, 50, dtype=np.float32)
    planted[:2] = True
    w = torch.nn.Parameter(torch.tensor(begin))
    theirs, scaler = RULES[rule][0]([w]), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)

    def made():
        storage = storage_of(50, where)
        storage.values[...] = where.asarray(np.append(begin, np.zeros(storage.size - 50, np.float32)))
        return RULES[rule][1](storage), GradientNorm(storage.segments), LossScale(where, initial=2.0**10, interval=5)

    def a_step(run, slope, step):
        optimizer, norm, scale = run
        flat = optimizer.storage.new_flat()
        flat[:50] = where.asarray(slope) * scale.scale(where.asarray(np.asarray(1.0, np.float32)))
        optimizer.update(flat, lr=0.01, step=step, numbers=scale.finish(norm, flat))

    run, other = made(), made()
    for step in range(STEPS):
        slope = rng.standard_normal(50).astype(np.float32)
        slope[17] = np.inf if planted[step] else slope[17]
        scaler.scale((w * torch.tensor(slope)).sum()).backward()
        scaler.step(theirs)
        scaler.update()
        theirs.zero_grad()
        a_step(run, slope, step + 1)
        np.testing.assert_allclose(asnumpy(run[0].storage.values)[:50], w.detach().numpy(), rtol=2e-6, atol=2e-7)
        if step == 24:                                        # what a checkpoint has
            for kind, flat in run[0].state.items():
                other[0].state[kind][...] = flat
            other[0].storage.values[...] = run[0].storage.values
            other[2].restore(run[2].record())
        if step >= 25:
            a_step(other, slope, step + 1)
            np.testing.assert_array_equal(asnumpy(other[0].storage.values), asnumpy(run[0].storage.values))
    assert int(run[2].record()["left_out"]) == planted.sum()


def test_the_scale_does_not_grow_beyond_what_float32_holds():
    scale, norm = LossScale(xp, initial=2.0**127, interval=1), GradientNorm(storage_of(8).segments)
    scale.finish(norm, put(np.ones(16, np.float32)))
    assert scale.record() == {"scale": 2.0**127, "good": 0, "left_out": 0}


def storage_of(n, where=xp):
    parameter = Parameter((n,), nn.init.zeros)
    parameter.name = "w"
    return FlatStorage([parameter], "float32", Device("gpu", where))


def test_a_step_with_a_scale_takes_three_launches_and_the_scale_stays_on_the_device():
    storage = storage_of(9000)
    storage.values[...] = 0
    optimizer, norm, scale = SGD(storage, 0.1), GradientNorm(storage.segments), LossScale(xp)
    flat = put(np.ones(storage.size, np.float32))
    before = sum(runtime.launched.values())
    optimizer.update(flat, lr=0.1, step=1, numbers=scale.finish(norm, flat, 1.0))
    assert sum(runtime.launched.values()) == before + 3


def test_what_is_kept_goes_on_where_the_run_stopped():
    one, two, norm = LossScale(xp, interval=3), LossScale(xp, interval=3), GradientNorm(storage_of(8).segments)
    good, bad = put(np.ones(16, np.float32)), put(np.full(16, np.inf, np.float32))
    for gradients in (bad, good, good):
        one.finish(norm, gradients)
    two.restore(one.record())
    two.restore({})
    for gradients in (good, bad):
        one.finish(norm, gradients)
        two.finish(norm, gradients)
        assert one.record() == two.record()
    assert one.record() == {"scale": 32768.0, "good": 0, "left_out": 2}
    one.restart()
    assert one.record() == {"scale": 32768.0, "good": 0, "left_out": 0}


def a_step(model, policy, start):
    policy.begin()
    policy.reducer.begin_micro_batch(last=True)
    y = model(Tensor(np.ones((2, 3))))
    with np.errstate(invalid="ignore"):
        run_backward(y, start(np.ones(y.shape)))
        return policy.finish()


def test_a_policy_skips_a_step_whose_gradient_is_not_finite_and_goes_on_with_half_the_scale():
    model, policy, _ = build(clip_norm=1.0)
    policy.loss_scale = LossScale(np)
    before = policy.values.copy()
    assert policy.needs_all_gradients
    assert not np.isfinite(a_step(model, policy, lambda grad: policy.loss_scale.scale(grad) * np.inf)["grad_norm"])
    np.testing.assert_array_equal(policy.values, before)
    assert float(policy.loss_scale.record()["scale"]) == 32768.0
    outcome = a_step(model, policy, policy.loss_scale.scale)
    assert (policy.values != before).any() and int(policy.loss_scale.record()["good"]) == 1

    plain_model, plain, _ = build(clip_norm=1.0)
    plain.step = 1                                            # the same rate
    assert a_step(plain_model, plain, lambda grad: grad)["grad_norm"] == outcome["grad_norm"]
    np.testing.assert_array_equal(policy.values, plain.values)


def test_a_checkpoint_has_the_scale_of_a_run_that_has_one():
    model, policy, _ = build()
    names = State(model, policy.optimizer, policy=policy).expected()
    policy.loss_scale = LossScale(np)
    state = State(model, policy.optimizer, policy=policy)
    assert set(state.expected()) - set(names) == KEPT
    assert {piece.name for piece in state.pieces()} >= KEPT


def test_a_scale_that_cannot_work_is_refused():
    for wrong in ({"initial": 0.0}, {"growth": 1.0}, {"backoff": 1.0}, {"interval": 0}):
        with pytest.raises(ConfigError, match="a loss scale wants"):
            LossScale(np, **wrong)
