"""A policy owns reduction, norm, clipping and the optimizer's step: their order, and what happens when one fails."""

from __future__ import annotations

import numpy as np
import pytest
from policy_setup import initialised

from mpitrain import nn, optim
from mpitrain.autograd import Tensor, run_backward
from mpitrain.comm.messages.prepare import Prepared
from mpitrain.errors import NumericsError
from mpitrain.parallel.policies.replicated import Replicated


class Two:
    """A channel of two ranks whose other rank contributes the same values; it notes what passes."""

    size, shared, notes, algorithm = 2, False, (), "auto"

    def __init__(self):
        self.summed = []

    def prepare(self, array, name):
        return Prepared(lambda: self.start_allreduce(array, name))

    def start_allreduce(self, array, name):
        self.summed.append(name)
        return Doubling(array)

    def allreduce(self, array, *, name):
        self.start_allreduce(array, name).wait()


class Doubling:
    """The sum lands when somebody waits for it, and not before."""

    def __init__(self, array):
        self.array, self.done = array, False

    def wait(self):
        self.array *= 2
        self.done = True


def build(clip_norm=0.0, lr=0.1, model=None, **options):
    model = model or nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    channel = Two()
    policy = initialised(Replicated, model, channel, clip_norm=clip_norm, precision="float64", bucket_bytes=8)
    policy.open(optim.SGD(policy.storage, lr=lr, momentum=0.0, **options), lambda step: lr / (step + 1))
    return model, policy, channel


def backward(model, update, x):
    update.begin()
    update.reducer.begin_micro_batch(last=True)
    y = model(Tensor(x))
    run_backward(y, np.ones(y.shape))


X = np.random.default_rng(0).standard_normal((5, 3))


def gradient_of(model):
    """The local gradient by itself, from a plain backward."""
    twin = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    twin.initialize(seed=1, dtype="float64")
    y = twin(Tensor(X))
    y.backward(np.ones(y.shape))
    return {name: p.grad for name, p in twin.named_parameters()}


def test_the_sum_over_ranks_is_clipped_by_its_own_norm_and_then_applied():
    model, update, _ = build(clip_norm=0.5)
    before = {name: p.array.copy() for name, p in model.named_parameters()}
    expected = {name: 2 * g for name, g in gradient_of(model).items()}
    norm = np.sqrt(sum((g**2).sum() for g in expected.values()))
    backward(model, update, X)
    outcome = update.finish()
    assert outcome["grad_norm"] == pytest.approx(norm) and norm > 0.5 and outcome["lr"] == 0.1
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.array, before[name] - 0.1 * expected[name] * 0.5 / (norm + 1e-6), rtol=1e-12)


def test_the_learning_rate_is_that_of_the_step():
    model, update, _ = build()
    rates = []
    for _ in range(3):
        backward(model, update, X)
        rates.append(update.finish()["lr"])
    assert rates == pytest.approx([0.1, 0.05, 0.1 / 3]) and update.step == 3


def test_the_first_update_is_the_first_for_the_optimizer_too():
    model, update, channel = build()
    update.optimizer = optim.Adam(model.storage, lr=0.1, eps=1e-12)
    before = model.storage.values.copy()
    backward(model, update, X)
    update.finish()
    moved = np.abs(model.storage.values - before)
    np.testing.assert_allclose(moved[update.reducer.gradients != 0], 0.1, rtol=1e-6)      # bias-corrected


def test_the_norm_costs_nothing_where_nobody_asks():
    model, update, _ = build()
    update.want_norm = False
    backward(model, update, X)
    assert update.finish()["grad_norm"] is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.promise("D1")
def test_a_gradient_that_is_not_finite_changes_no_parameter_and_names_one(bad):
    model, update, _ = build()
    before = model.storage.values.copy()
    backward(model, update, X)
    model[2].weight.grad[1, 2] = bad
    with pytest.raises(NumericsError, match='the gradient of "2.weight" is not finite; no parameter was changed') as caught:
        update.finish()
    assert caught.value.step == 1 and caught.value.exit_code == 79
    np.testing.assert_array_equal(model.storage.values, before)


def test_running_statistics_change_once_a_step_by_the_mean_over_ranks_and_micro_batches():
    model = nn.Sequential(nn.BatchNorm1d(3))
    _, update, channel = build(model=model)
    halves = X[:4], X[1:5]
    update.begin()
    for i, half in enumerate(halves):
        update.reducer.begin_micro_batch(last=i == 1)
        y = model(Tensor(half))
        run_backward(y, np.ones(y.shape))
    np.testing.assert_array_equal(model[0].running_mean.array, np.zeros(3))          # not yet
    update.finish()
    mean = (halves[0].mean(0) + halves[1].mean(0)) / 2
    np.testing.assert_allclose(model[0].running_mean.array, 0.1 * mean, rtol=1e-12)
    assert channel.summed[-1] == "batch statistics"
