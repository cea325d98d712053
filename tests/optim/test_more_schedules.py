"""Further learning rates against PyTorch's schedulers, to 1e-15 of the peak; the plateau goes on from its record."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.optim import schedule
from mpitrain.optim.schedule import Adaptive

STEPS, LR = 120, 0.3
TRIANGLE = {"base_lr": 0.02, "max_lr": LR, "step_size_up": 7, "step_size_down": 12, "cycle_momentum": False}
CYCLE = {"min_lr": 0.02, "step_size_up": 7, "step_size_down": 12}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "exponential": ({"gamma": 0.97}, lambda t, o: t.ExponentialLR(o, 0.97)),
    "polynomial": ({"power": 2.5}, lambda t, o: t.PolynomialLR(o, STEPS, 2.5)),
    "step": ({"step_size": 9, "gamma": 0.8}, lambda t, o: t.StepLR(o, 9, 0.8)),
    "warm_restarts": ({"t_0": 10, "min_lr": 0.01}, lambda t, o: t.CosineAnnealingWarmRestarts(o, 10, 1, 0.01)),
    "warm_restarts 2": ({"t_0": 5, "t_mult": 2}, lambda t, o: t.CosineAnnealingWarmRestarts(o, 5, 2)),
    "cyclic": (CYCLE, lambda t, o: t.CyclicLR(o, **TRIANGLE)),
    "cyclic 2": ({**CYCLE, "mode": "triangular2"}, lambda t, o: t.CyclicLR(o, mode="triangular2", **TRIANGLE)),
    "cyclic exp": ({**CYCLE, "mode": "exp_range", "gamma": 0.99},
                   lambda t, o: t.CyclicLR(o, mode="exp_range", gamma=0.99, **TRIANGLE)),
    "chained": ({"schedules": [{"name": "exponential", "gamma": 0.99}, {"name": "step", "milestones": [20, 50], "gamma": 0.5}]},
                lambda t, o: t.ChainedScheduler([t.ExponentialLR(o, 0.99), t.MultiStepLR(o, [20, 50], 0.5)])),
    "sequential": ({"milestones": [30, 70], "schedules": [{"name": "exponential", "gamma": 0.9}, {"name": "cosine"},
                                                           {"name": "constant", "lr": LR}]},
                   lambda t, o: t.SequentialLR(o, [t.ExponentialLR(o, 0.9), t.CosineAnnealingLR(o, 40), t.ConstantLR(o, 1.0)],
                                               [30, 70])),
}


@pytest.mark.parametrize("case", CASES)
def test_rates_are_pytorchs(case: str) -> None:
    torch = pytest.importorskip("torch")
    options, make = CASES[case]
    rate = schedule(case.split()[0], lr=LR, total_steps=STEPS, **options)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")           # PyTorch's recursions round at every step; ours are functions of the step
        scheduler = make(torch.optim.lr_scheduler, optimizer)
        for step in range(STEPS):
            wanted = optimizer.param_groups[0]["lr"]
            assert abs(rate(step) - wanted) <= 1e-15 + 1e-15 * LR, (step, rate(step), wanted)
            optimizer.step()
            scheduler.step()


def test_warm_up_comes_before_any_of_them_and_the_root_follows_it() -> None:
    rate = schedule("inverse_square_root", lr=1.0, warmup_steps=3, total_steps=20)
    assert [rate(k) for k in range(5)] == [0.25, 0.5, 0.75, 1.0, (4 / 5) ** 0.5]
    rate = schedule("exponential", lr=1.0, warmup_steps=3, total_steps=20, gamma=0.5)
    assert [rate(k) for k in range(6)] == [0.25, 0.5, 0.75, 1.0, 0.5, 0.25]


@pytest.mark.parametrize(("name", "more"), [("sequential", {}), ("chained", {})])
def test_a_part_of_a_schedule_warms_up_by_itself(name: str, more: dict[str, Any]) -> None:
    part = {"name": "linear", "warmup_steps": 4}
    rate, alone = schedule(name, lr=0.5, total_steps=20, schedules=[part], **more), schedule("linear", lr=0.5, warmup_steps=4,
                                                                                             total_steps=20)
    assert [rate(k) for k in range(20)] == pytest.approx([alone(k) for k in range(20)], rel=1e-15)
    assert rate(0) == pytest.approx(0.1)


@pytest.mark.parametrize("options", [{}, {"patience": 2, "factor": 0.5, "cooldown": 3, "min_lr": 0.01},
                                     {"patience": 0, "threshold": 0.05, "threshold_mode": "abs"}])
def test_the_plateau_is_pytorchs_and_goes_on_from_its_record(options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options)
    rate: Any = schedule("plateau", lr=LR, total_steps=STEPS, **options)
    assert isinstance(rate, Adaptive)
    losses = np.cumsum(np.random.default_rng(4).standard_normal(80)) * 0.1 + 5
    for step, loss in enumerate([*losses, float("nan")]):
        scheduler.step(loss)
        rate.observe(loss)
        assert rate(step) == optimizer.param_groups[0]["lr"]
        again: Any = schedule("plateau", lr=LR, total_steps=STEPS, **options)
        again.restore(json.loads(json.dumps(rate.record())))
        rate = again
    assert rate(0) < LR


def test_what_makes_no_sense_is_refused_in_one_line() -> None:
    for name, options in (("cyclic", {"mode": "square"}), ("polynomial", {"power": 0.0}), ("warm_restarts", {"t_mult": 0}),
                          ("sequential", {"schedules": [{"name": "cosine"}], "milestones": [4]}), ("chained", {}),
                          ("chained", {"schedules": [{"name": "plateau"}]}), ("chained", {"schedules": [{"gamma": 2}]}),
                          ("chained", {"schedules": ["cosine"]}), ("sequential", {"schedules": [3]}),
                          ("plateau", {"lr_eps": -1.0}), ("exponential", {"gamma": -0.5}), ("exponential", {"gamma": "half"}),
                          ("chained", {"schedules": [{"name": "cosine", "gama": 2}]}), ("plateau", {"factor": 2.0}),
                          ("step", {"step_size": -1})):
        with pytest.raises(ConfigError):
            schedule(name, lr=1.0, total_steps=10, **options)
