"""One stage is gradient accumulation: however a global batch is cut, the loss and the gradients are those of the whole."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from fakegpu import xp

from mpitrain import nn
from mpitrain.backend import CPU, Device, asnumpy
from mpitrain.comm.messages.prepare import ALONE
from mpitrain.data import MicroBatch
from mpitrain.errors import NumericsError
from mpitrain.parallel.gradients.bucket_sum import AllReduce
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.gradients.replicas import SumOverRanks
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.parallel.pipeline.late import parts_of
from mpitrain.parallel.pipeline.runner import Pipeline
from mpitrain.parallel.policies.loss_scale import LossScale
from mpitrain.placement import stages

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((10, 6)), RNG.integers(0, 3, 10)


class Alone:
    size = 1

    def prepare(self, array, name):
        return ALONE


def run(cuts, *, ignore=None, step=0, x=X, model=None, spoil=lambda loss: loss, goes_on=False, device=CPU,
        scale=None):
    """(loss, gradients by name) of the batch cut at the given rows."""
    model = model or nn.Sequential(("a", nn.Linear(6, 8)), ("drop", nn.Dropout(0.4)), ("act", nn.Tanh()), ("b", nn.Linear(8, 3)))
    storage = model.initialize(seed=2, dtype="float64", device=device)
    reducer = GradientReducer(storage, AllReduce(Alone()))
    loss = spoil(nn.LOSSES["cross_entropy"](ignore_index=ignore))
    pipeline = Pipeline(stages.whole(model), loss, Alone(), reducer, Feed(device, "float64"), n_micro=len(cuts) + 1, seed=5,
                        goes_on=goes_on)
    pipeline.scale = scale
    bounds = [0, *cuts, len(x)]
    micro = [MicroBatch(x[a:b], Y[a:b], np.arange(a, b, dtype=np.uint64), i, a, step)
             for i, (a, b) in enumerate(zip(bounds, bounds[1:]))]
    reducer.begin()
    value = parts_of(pipeline.run(micro)).sum()
    reducer.finish()
    return value, {name: asnumpy(p.grad).copy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("cuts", [[5], [1, 2], [3, 4, 9], list(range(1, 10))])
@pytest.mark.parametrize("ignore", [None, 1])
def test_the_cut_changes_nothing_but_rounding_dropout_included(cuts, ignore):
    loss, grads = run([], ignore=ignore)
    found, others = run(cuts, ignore=ignore)
    assert found == pytest.approx(loss, rel=1e-13)
    for name, grad in grads.items():
        np.testing.assert_allclose(others[name], grad, rtol=1e-11, atol=1e-14)


def test_another_step_has_another_mask_and_the_same_step_the_same():
    assert run([5])[0] == run([5])[0] != run([5], step=1)[0]


def test_a_loss_that_is_not_finite_names_step_micro_batch_and_layer():
    bad = X.copy()
    bad[7, 2] = np.nan
    with pytest.raises(NumericsError, match="loss of micro-batch 1 is nan; .* the input of the model") as caught:
        run([5], x=bad, step=4)
    assert caught.value.step == 5 and caught.value.micro_batch == 1 and caught.value.rows == [7]


class PlusInfinity:
    """A loss that is infinite for the batches of four rows; its gradient stays finite."""

    def __init__(self, loss):
        self.loss, self.kind, self.count = loss, loss.kind, loss.count

    def __call__(self, output, target):
        return self.loss(output, target) + (np.inf if len(target) == 4 else 0.0)


@pytest.mark.promise("D1")
def test_where_a_run_goes_on_a_loss_that_is_not_finite_makes_the_gradients_nan_that_all_ranks_see():
    value, gradients = run([6], spoil=PlusInfinity, goes_on=True)
    assert np.isnan(value) and all(np.isnan(gradient).any() for gradient in gradients.values())
    value, gradients = run([5], spoil=PlusInfinity, goes_on=True)
    assert np.isfinite(value) and all(np.isfinite(gradient).all() for gradient in gradients.values())
    with pytest.raises(NumericsError, match="micro-batch 1 is inf; .* the loss function"):
        run([6], spoil=PlusInfinity)


def test_the_first_bad_layer_is_named_also_below_a_recorded_sum_over_ranks():
    class Blow(nn.Module):
        def forward(self, x):
            return x * 1e200 * 1e200

    model = nn.Sequential(("norm", nn.SyncBatchNorm(6)), ("blow", Blow()), ("out", nn.Linear(6, 3)))
    calls = []
    model["norm"].across = SumOverRanks(SimpleNamespace(rank=0, size=2, allreduce=lambda array, name: calls.append(name)))
    with np.errstate(all="ignore"), pytest.raises(NumericsError, match=r'the layer "blow" \(Blow\)'):
        run([], model=model)
    assert calls == ["batch norm"] and model["norm"].across.channel.allreduce        # not while looking for the layer


@pytest.mark.parametrize("cuts", [[], [3], [1, 4, 6]])
def test_the_balance_of_experts_is_a_mean_over_the_rows_of_all_micro_batches(cuts, monkeypatch):
    """The gradient is that of (mean loss) + weight * (mean over rows of each micro-batch's balance): against differences of that.

    Rows whose label is ignored count for the balance, and not for the loss.
    """
    monkeypatch.setattr("mpitrain.nn.moe.TALLY_UNIT", 1 << 48)      # as good as not rounded

    def model():
        return nn.Sequential(("a", nn.Linear(6, 6)), ("experts", nn.MixtureOfExperts(6, 8, 3, balance=0.4, normalised=False)),
                             ("b", nn.Linear(6, 3)))

    made = model()
    _, grads = run(cuts, ignore=1, model=made)
    way = {name: RNG.standard_normal(grad.shape) for name, grad in grads.items()}

    def objective(distance):
        moved = model()
        moved.initialize(seed=2, dtype="float64")
        for name, p in moved.named_parameters():
            p.array += distance * way[name]
        total, balance, bounds = 0.0, 0.0, [0, *cuts, len(X)]
        for a, b in zip(bounds, bounds[1:]):
            total += float(nn.LOSSES["cross_entropy"](ignore_index=1)(moved(X[a:b]), Y[a:b]))
            balance += moved["experts"].take_tally()[0]
        return total / (Y != 1).sum() + 0.4 * balance / len(X)

    slope = (objective(1e-6) - objective(-1e-6)) / 2e-6
    assert sum((grads[name] * way[name]).sum() for name in grads) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("shared", [True, False])
def test_a_lost_micro_batch_sends_rows_back_to_experts_that_others_wait_with(shared, monkeypatch):
    """Where a stage before made the loss NaN, backward is only run for the ranks that have experts in common."""
    layer, passed = nn.MixtureOfExperts(6, 8, 2), []
    layer.after_backward(passed.append)
    layer.across = SimpleNamespace(exchange=lambda there, experts: experts(there), forward=lambda inner, x: inner(x)) if (
        shared) else None
    monkeypatch.setattr(Pipeline, "_is_lost", lambda *_: True)
    run([5], model=nn.Sequential(("a", nn.Linear(6, 6)), ("experts", layer), ("b", nn.Linear(6, 3))))
    assert len(passed) == (2 if shared else 0)


@pytest.mark.parametrize("device", [CPU, Device("gpu", xp)], ids=["host", "stand-in"])
def test_the_scale_of_the_loss_is_that_of_terms_that_layers_add_as_well(device):
    def gradients(scale):
        mixture = nn.MixtureOfExperts(6, 8, experts=3, top_k=1, balance=5.0)
        model = nn.Sequential(("a", nn.Linear(6, 6)), ("mixture", mixture), ("b", nn.Linear(6, 3)))
        return run([4], model=model, device=device, scale=scale)[1]
    plain, scaled = gradients(None), gradients(LossScale(device.xp, initial=1024.0).scale)
    for name, gradient in plain.items():
        np.testing.assert_allclose(scaled[name] / 1024, gradient, rtol=1e-6, atol=1e-8, err_msg=name)
