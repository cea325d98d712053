"""Learning rates against PyTorch's schedulers and nanoGPT's formula."""

import math
import warnings

import pytest

from mpitrain.errors import ConfigError
from mpitrain.optim import SCHEDULES, schedule


def nanogpt(it, lr, min_lr, warmup, decay_steps):
    """get_lr of nanoGPT's train.py."""
    if it < warmup:
        return lr * (it + 1) / (warmup + 1)
    if it > decay_steps:
        return min_lr
    ratio = (it - warmup) / (decay_steps - warmup)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (lr - min_lr)


def test_cosine_is_nanogpt_s_to_the_bit():
    rate = schedule("cosine", lr=1e-3, min_lr=1e-4, warmup_steps=100, total_steps=2000)
    for it in range(2100):
        assert rate(it) == nanogpt(it, 1e-3, 1e-4, 100, 2000)


def torch_rates(make, lr, steps):
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                   # about the order of calls: only the rates matter here
        scheduler = make(torch.optim.lr_scheduler, optimizer)
        rates = []
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    return rates


@pytest.mark.parametrize(("settings", "make"), [
    ({"name": "constant"}, lambda s, o: s.ConstantLR(o, 1.0)),
    ({"name": "linear", "min_lr": 0.03}, lambda s, o: s.LinearLR(o, 1.0, 0.1, total_iters=50)),
    ({"name": "cosine", "min_lr": 0.03}, lambda s, o: s.CosineAnnealingLR(o, 50, eta_min=0.03)),
    ({"name": "step"}, lambda s, o: s.MultiStepLR(o, [25, 37])),
    ({"name": "step", "milestones": [30, 10], "gamma": 0.5}, lambda s, o: s.MultiStepLR(o, [10, 30], gamma=0.5)),
    ({"name": "one_cycle", "min_lr": 0.3 / 25 / 1e4}, lambda s, o: s.OneCycleLR(o, 0.3, total_steps=50)),
    ({"name": "one_cycle", "min_lr": 0.3 / 25 / 1e4, "warmup_steps": 10},
     lambda s, o: s.OneCycleLR(o, 0.3, total_steps=50, pct_start=0.2))])
def test_rates_are_those_of_pytorch(settings, make):
    rate = schedule(lr=0.3, total_steps=50, **settings)
    expected = torch_rates(make, 0.3, 49)
    assert [rate(k) for k in range(49)] == pytest.approx(expected, rel=1e-9)


def test_one_cycle_ends_at_the_smallest_rate():
    rate = schedule("one_cycle", lr=0.3, min_lr=0.01, total_steps=50)
    assert rate(49) == pytest.approx(0.01) and rate(80) == pytest.approx(0.01)
    assert max(rate(k) for k in range(50)) == pytest.approx(0.3)


@pytest.mark.parametrize("name", ["constant", "step", "linear", "cosine"])
def test_warm_up_rises_in_a_line_and_the_rate_never_falls_below_the_smallest(name):
    rate = schedule(name, lr=1.0, min_lr=0.2, warmup_steps=4, total_steps=40)
    assert [rate(k) for k in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rate(4) == 1.0
    assert min(rate(k) for k in range(4, 100)) >= 0.2


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"sequential", "chained"}))
@pytest.mark.parametrize(("warmup", "total"), [(0, 0), (0, 1), (1, 1), (2, 2), (1, 3)])
def test_very_short_runs_have_finite_rates(name, warmup, total):
    rate = schedule(name, lr=0.5, warmup_steps=warmup, total_steps=total)
    assert all(0.0 <= rate(k) <= 0.5 for k in range(5))


def test_a_schedule_of_one_s_own_is_warmed_up_too():
    def halves(*, lr, min_lr, warmup_steps, total_steps, each):
        return lambda step: lr * 0.5 ** ((step - warmup_steps) // each)
    rate = schedule(halves, lr=1.0, warmup_steps=1, total_steps=10, each=2)
    assert [rate(k) for k in range(5)] == [0.5, 1.0, 1.0, 0.5, 0.5]


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match='unknown schedule "cosin".*did you mean "cosine"'):
        schedule("cosin", lr=1.0, total_steps=10)
    with pytest.raises(ConfigError, match="optimizer.min_lr must lie between 0 and lr = 1.0, not 2.0"):
        schedule("cosine", lr=1.0, min_lr=2.0, total_steps=10)
    with pytest.raises(ConfigError, match="optimizer.warmup_steps must be 0 or more, not -1"):
        schedule("cosine", lr=1.0, warmup_steps=-1, total_steps=10)


def test_a_run_that_ends_during_its_warm_up_only_rises():
    rate = schedule("cosine", lr=1.0, warmup_steps=9, total_steps=3)
    assert [rate(k) for k in range(3)] == pytest.approx([0.1, 0.2, 0.3])
