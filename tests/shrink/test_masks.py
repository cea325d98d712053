"""Masks: the k smallest exactly, over any cut of the weights; patterns; the schedule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpitrain.config import load_config
from mpitrain.errors import ConfigError
from mpitrain.nn import init
from mpitrain.nn.parameter import Parameter
from mpitrain.shrink.masks import Layer, Part
from mpitrain.shrink.rules import Block, Magnitude, NOfM
from mpitrain.shrink.schedule import Schedule
from mpitrain.shrink.select import magnitude_bits, smallest

RUN = '[model]\nname = "mlp"\n[data]\npath = "digits"\n[train]\nsteps = 10\n'


def part(values: np.ndarray, first: int = 0) -> tuple[Parameter, Part]:
    """The part of a weight of 6 x 8 that these elements, from `first`, are."""
    leaf = Parameter((6, 8), init.zeros)
    leaf.name = "w"
    return leaf, Part(leaf, first, values, np.ones(values.size, np.uint8), True)


def chosen(rule: object, weights: list[np.ndarray], share: float, cuts: list[list[int]]) -> list[np.ndarray]:
    """The masks of weights, each cut into slices at `cuts`, as ranks of one process that add up tables would have them."""
    layers = [Layer(str(i), (6, 8)) for i in range(len(weights))]
    for layer, w, at in zip(layers, weights, cuts):
        for first, stop in zip([0, *at], [*at, w.size]):
            layer.parts.append(part(w.reshape(-1)[first:stop].copy(), first)[1])
    rule.choose(layers, share, lambda table: None)                # type: ignore[attr-defined]
    return [np.concatenate([p.kept for p in layer.parts]).reshape(6, 8) for layer in layers]


def reference(values: np.ndarray, share: float) -> np.ndarray:
    """By a stable sort of sizes in float64: the first of equal ones are pruned."""
    order = np.argsort(np.abs(values.astype(np.float64)), kind="stable")
    kept = np.ones(values.size, np.uint8)
    kept[order[:int(share * values.size + 0.5)]] = 0
    return kept


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "denormal"])
def test_the_smallest_weights_are_those_of_a_stable_sort_however_they_are_cut(dtype: str, kind: str) -> None:
    rng = np.random.default_rng(3)
    weights = [rng.normal(size=(6, 8)).astype(dtype) for _ in range(3)]
    if kind == "ties":
        weights = [np.round(w).astype(dtype) for w in weights]
    elif kind == "zeros":
        weights = [w * (rng.random((6, 8)) < 0.2).astype(dtype) for w in weights]
    elif kind == "denormal":
        weights = [(w * np.finfo(dtype).smallest_subnormal * 100).astype(dtype) for w in weights]
    for share in (0.0, 0.01, 0.37, 0.5, 0.9, 0.999):
        for cuts in ([[], [], []], [[5], [13, 40], [1, 2]]):
            for mask, w in zip(chosen(Magnitude("layer"), weights, share, cuts), weights):
                assert np.array_equal(mask.reshape(-1), reference(w.reshape(-1), share))
            everywhere = np.concatenate(chosen(Magnitude("global"), weights, share, cuts)).reshape(-1)
            assert np.array_equal(everywhere, reference(np.concatenate(weights).reshape(-1), share))


def test_the_kth_of_several_ranks_tables_is_that_of_all_their_numbers() -> None:
    """Two ranks, in turn: each round's table is the sum of both."""
    rng = np.random.default_rng(0)
    numbers = [rng.integers(0, 1 << 62, 100).astype(np.uint64) for _ in range(2)]
    everyone = np.sort(np.concatenate(numbers))
    for k in (1, 50, 200):
        found = smallest([numbers], [k], 64, lambda table: None)
        assert int(found.threshold[0]) == int(everyone[k - 1]) and found.taken[0] == found.equal[0] == 1


def test_bits_have_the_order_of_sizes() -> None:
    values = np.array([-2.0, 0.0, -0.0, 1e-45, np.inf, np.nan, 1.5], np.float32)
    assert list(np.argsort(magnitude_bits(values), kind="stable")) == [1, 2, 3, 6, 0, 4, 5]


def test_n_of_m_keeps_the_largest_of_each_group() -> None:
    w = np.array([[1, -4, 3, 2, 5, 5, 5, 5]] * 6, np.float32)
    mask, = chosen(NOfM("2:4"), [w], 0.0, [[16]])
    assert np.array_equal(mask, [[0, 1, 1, 0, 0, 0, 1, 1]] * 6)


def test_blocks_go_by_their_sums_whatever_cuts_them() -> None:
    rng = np.random.default_rng(1)
    w = rng.normal(size=(6, 8)).astype(np.float32)
    sums = np.abs(w.astype(np.float64)).reshape(3, 2, 8).sum(axis=1).reshape(-1)
    for cuts in ([], [3], [7, 30]):
        mask, = chosen(Block("2x1"), [w], 0.5, [cuts])
        assert np.array_equal(mask.reshape(3, 2, 8)[:, 0].reshape(-1), reference(sums, 0.5))
        assert np.array_equal(mask[0::2], mask[1::2])


def test_the_schedule_is_cubic_and_choices_come_in_their_interval() -> None:
    plan = Schedule(0.8, 10, 30, 8)
    assert [step for step in range(50) if plan.due(step)] == [10, 18, 26, 30]
    assert plan.at(9) == plan.at(10) == 0.0 and plan.at(30) == plan.at(99) == 0.8
    assert plan.at(20) == pytest.approx(0.8 * (1 - 0.5 ** 3))
    assert Schedule(0.5, 7, 7, 1).due(7) and not Schedule(0.5, 7, 7, 1).due(8)


@pytest.mark.parametrize(("overrides", "words"), [
    (["shrink.sparsity=0.5"], "shrink.sparsity is there, and nothing is pruned"),
    (["shrink.prune=magnitud"], 'shrink.prune = "magnitud" is not there (did you mean "magnitude"?)'),
    (["shrink.prune=magnitude"], "shrink.sparsity must lie in (0, 1), found 0"),
    (["shrink.prune=magnitude", "shrink.sparsity=1.0"], "shrink.sparsity must lie in (0, 1), found 1"),
    (["shrink.prune=magnitude", "shrink.sparsity=0.5", "shrink.begin=5", "shrink.end=4"], "shrink.begin = 5 comes after"),
    (["shrink.prune=magnitude", "shrink.sparsity=0.5", "shrink.pattern=2:4"], 'shrink.pattern = "2:4" is not for'),
    (["shrink.prune=magnitude", "shrink.sparsity=0.5", "shrink.rewind=3", "shrink.end=3"],
     'shrink.rewind must be "never", or a step before shrink.end = 3'),
    (["shrink.prune=magnitude", "shrink.sparsity=0.5", "comm.sharding=own.py:P"], "is not for comm.sharding"),
    (["shrink.prune=magnitude", "shrink.sparsity=0.5", "shrink.every=0"], "shrink.every must be at least 1, found 0"),
    (["shrink.prune=n:m"], "needs shrink.pattern, such as 2:4"),
    (["shrink.prune=n:m", "shrink.pattern=2:4", "shrink.sparsity=0.5"], "is not for \"n:m\""),
    (["shrink.prune=n:m", "shrink.pattern=2:4", "shrink.scope=global"], 'shrink.scope = "global" is not for'),
])
def test_keys_that_make_no_sense_are_refused_by_name(tmp_path: Path, overrides: list[str], words: str) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "run.toml", overrides)
    assert words in str(error.value)


@pytest.mark.parametrize(("rule", "pattern"), [(NOfM, "4:2"), (NOfM, "0:4"), (NOfM, "2:3"), (NOfM, "2x4"), (Block, "0x4"),
                                               (Block, "1x1"), (Block, "99x99"), (Block, "2:4")])
def test_patterns_that_are_none_are_refused(rule: type, pattern: str) -> None:
    with pytest.raises(ConfigError, match=f'found "{pattern}"'):
        rule(pattern)
