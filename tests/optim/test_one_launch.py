"""Updates on a device: one launch for all runs, with the host's bits; the copy in 16 bits; the norm in two launches."""

from __future__ import annotations

import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from device_on_host import compiler
from fakegpu import put, runtime, xp

from mpitrain import models
from mpitrain.backend import CPU, Device
from mpitrain.kernels.device.optimizer import step_scalars
from mpitrain.kernels.optimizer import FACTOR, FOUND, NORM, conclude_norm
from mpitrain.nn import FlatStorage, Parameter, init
from mpitrain.optim import LAMB, LARS, SGD, Adam, AdamW, Lion, RMSprop, clip_factor, squared_norm
from mpitrain.optim.norm import numbers_of_a_step
from mpitrain.parallel.gradients.norm import GradientNorm

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
GPU = Device("gpu", xp)
SHAPES = {"embed": (70, 33), "bias": (33,), "weight": (33, 131), "gain": (5,), "frozen": (9, 9), "head": (3, 7)}
RULES = {
    "sgd": lambda m, **k: SGD(m, 0.1, weight_decay=0.03, decay="matrices", **k),
    "momentum": lambda m, **k: SGD(m, 0.1, momentum=0.9, weight_decay=0.03, decay="matrices", **k),
    "nesterov": lambda m, **k: SGD(m, 0.1, momentum=0.9, nesterov=True, maximize=True, **k),
    "dampened": lambda m, **k: SGD(m, 0.1, momentum=0.9, dampening=0.3, weight_decay=0.03, **k),
    "adam": lambda m, **k: Adam(m, 0.01, weight_decay=0.1, decay="matrices", **k),
    "adamw": lambda m, **k: AdamW(m, 0.01, weight_decay=0.1, decay="matrices", **k),
    "amsgrad": lambda m, **k: AdamW(m, 0.01, weight_decay=0.1, decay="matrices", amsgrad=True, **k),
    "rmsprop": lambda m, **k: RMSprop(m, 0.01, momentum=0.5, weight_decay=0.1, **k),
    "centered": lambda m, **k: RMSprop(m, 0.01, momentum=0.5, centered=True, decay="matrices", weight_decay=0.1, **k),
}
MORE = {"lamb": lambda m: LAMB(m, 0.01, weight_decay=0.1), "lars": lambda m: LARS(m, 0.1, weight_decay=0.1),
        "lion": lambda m: Lion(m, 0.01)}


def storage(device, dtype="float32"):
    parameters = []
    for name, shape in SHAPES.items():
        parameters.append(Parameter(shape, init.normal(1.0)))
        parameters[-1].name = name
        parameters[-1].requires_grad = name != "frozen"
    made = FlatStorage(parameters, dtype, device)
    made.values[...] = 0
    values = np.random.default_rng(7).standard_normal(made.size).astype(dtype)
    for s, view in zip(made.segments, made.views(made.values)):
        view[...] = device.put(values[s.start:s.stop].reshape(s.shape))
    return made


def gradients(like, step):
    flat = np.zeros(like.size, like.dtype)
    for s in like.segments:
        flat[s.start:s.stop] = np.random.default_rng([step, s.start]).standard_normal(s.stop - s.start)
    return flat


def assert_equal(device, host):
    np.testing.assert_array_equal(device.storage.values.get(), host.storage.values)
    for name, flat in host.state.items():
        np.testing.assert_array_equal(device.state[name].get(), flat)


def launches(update):
    before = sum(runtime.launched.values())
    update()
    return sum(runtime.launched.values()) - before


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", [*RULES, *MORE])
def test_an_update_on_a_device_has_the_bits_of_the_hosts(rule, dtype):
    make = {**RULES, **MORE}[rule]
    host, device = make(storage(CPU, dtype)), make(storage(GPU, dtype))
    for step in range(1, 5):
        flat, rate = gradients(host.storage, step), 0.01 / step
        host.update(flat, lr=rate, step=step, scale=0.7)
        count = launches(lambda: device.update(put(flat), lr=rate, step=step, scale=0.7))    # noqa: B023
        assert count == 1 or rule in MORE
        assert_equal(device, host)


@pytest.mark.parametrize("rule", ["adamw", "momentum"])
def test_parts_of_parameters_are_updated_by_one_launch_too_wherever_they_begin(rule):
    host, device = RULES[rule](storage(CPU)), RULES[rule](storage(GPU))
    from dataclasses import replace
    for step, cut in ((1, 16), (2, 2049), (3, 3)):
        flat = gradients(host.storage, step)
        for optimizer, given in ((host, flat), (device, put(flat))):
            parts = [replace(s, start=min(s.start + cut, s.stop)) for s in optimizer.storage.segments]
            optimizer.update(given, lr=0.01, step=step, segments=parts)
        assert_equal(device, host)


def test_groups_take_a_launch_each_and_have_the_hosts_bits():
    from mpitrain.optim.groups import Group, Grouped
    groups = [Group(("e*", "gain"), factor=0.5, keys={"weight_decay": 0.2}), Group(("frozen",), start=math.inf)]

    def make(where):
        return Grouped(lambda s, keys: AdamW(s, **keys), storage(where), groups, 0.01)
    host, device = make(CPU), make(GPU)
    for step in (1, 2):
        flat = gradients(host.storage, step)
        host.update(flat, lr=0.01, step=step)
        assert launches(lambda: device.update(put(flat), lr=0.01, step=step)) == 2           # noqa: B023
        assert_equal(device, host)


@pytest.mark.parametrize("grouped", [False, True])
def test_slices_of_a_rank_are_updated_where_they_lie(grouped):
    from mpitrain.optim.groups import Group, Grouped
    from mpitrain.placement.shards import Shards
    made = {}
    for where in (CPU, GPU):
        layout = storage(where)
        made[where] = shards = Shards(layout, 1, 3, bucket_bytes=4096, cuts=[], whole=False)
        shards.values = shards.strips(layout.values)
        optimizer = RULES["adamw"](shards) if not grouped else Grouped(
            lambda s, keys: AdamW(s, **keys), shards, [Group(("weight",), keys={"weight_decay": 0.5})], 0.01)
        for step in (1, 2):
            flat = where.put(gradients(layout, step))
            for unit in shards.units:
                optimizer.update(shards.strips(flat), lr=0.01, step=step, segments=unit.parts)
    np.testing.assert_array_equal(made[GPU].layout.values.get(), made[CPU].layout.values)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("rule", ["adamw", "sgd", "lion"])
def test_the_copy_in_16_bits_is_written_with_the_values_it_is_of(rule, dtype):
    made = storage(GPU)
    made.compute = xp.empty(made.size, dtype)
    made.compute[...] = made.values.astype(dtype)
    before = made.compute.get()
    optimizer = {**RULES, **MORE}[rule](made)
    flat = gradients(made, 1)
    flat[:3] = 1e30 if rule == "sgd" else 0                                # beyond float16
    with np.errstate(over="ignore"):
        count = launches(lambda: optimizer.update(put(flat), lr=0.1, step=1))
        expected = made.values.get().astype(dtype)
    assert count == 1 or rule == "lion"
    np.testing.assert_array_equal(made.compute.get().view(np.uint16), expected.view(np.uint16))
    assert (made.compute.get() != before).any()


@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_numbers_on_the_device_scale_the_gradients_or_keep_everything_as_it_is(rule):
    make = {**RULES, **MORE}[rule]
    host, device = make(storage(CPU)), make(storage(GPU))
    numbers, flat = np.zeros(8), gradients(host.storage, 1)
    numbers[FACTOR] = 0.3
    host.update(flat, lr=0.01, step=1, scale=0.3)
    device.update(put(flat), lr=0.01, step=1, numbers=put(numbers))
    assert_equal(device, host)
    numbers[FOUND] = 1
    device.update(put(np.full_like(flat, np.nan)), lr=0.01, step=2, numbers=put(numbers))
    assert_equal(device, host)
    assert device.steps == 2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("limit", [0.0, 3.0, 1e9])
def test_norm_and_factor_of_clipping_are_the_hosts_to_the_bit_after_two_launches(dtype, limit):
    host, device = storage(CPU, dtype), storage(GPU, dtype)
    norm, flat, numbers = GradientNorm(device.segments), gradients(host, 1), numbers_of_a_step(xp)
    assert launches(lambda: norm.conclude(put(flat), numbers, limit)) == 2
    expected = math.sqrt(squared_norm(host.segments, flat))
    assert numbers.get()[NORM] == expected == GradientNorm(host.segments)(flat) == norm(put(flat))
    assert numbers.get()[FACTOR] == (clip_factor(expected, limit) if limit else 1.0)
    assert numbers.get()[FOUND] == 0


def test_a_clipped_step_on_a_device_that_nobody_waits_for_has_the_hosts_bits():
    host, device = RULES["adamw"](storage(CPU)), RULES["adamw"](storage(GPU))
    norm, numbers = GradientNorm(device.storage.segments), numbers_of_a_step(xp)
    for step in (1, 2, 3):
        flat, moved = gradients(host.storage, step), put(gradients(host.storage, step))
        scale = clip_factor(math.sqrt(squared_norm(host.storage.segments, flat)), 1.5)
        host.update(flat, lr=0.01, step=step, scale=scale)

        def whole_step(given=moved, step=step):
            norm.conclude(given, numbers, 1.5)
            device.update(given, lr=0.01, step=step, numbers=numbers)
        assert launches(whole_step) == 4, "one brings the scalars of the step to their place"
        assert_equal(device, host)


def halves(n):
    """A large sum, and n that lie halfway between two multiples of its last place, or on one."""
    return np.append(2.0**20, 2.0**-33 * np.random.default_rng(n).integers(0, 4, n))


@pytest.mark.parametrize("sums", [
    *(np.abs(np.random.default_rng(n).standard_normal(n)) for n in (1, 2, 255, 256, 257, 1024, 1025, 5000)),
    halves(3000), np.exp(np.random.default_rng(0).uniform(-60, 60, 4000)), np.full(3000, 2.0**-1074), np.full(1500, 2.0**1013),
    np.append(np.zeros(700), halves(1500)), np.append(np.ones(900), [np.inf, 1.0]), np.append(np.ones(900), np.nan)])
def test_sums_of_blocks_are_added_as_if_one_after_the_other(sums):
    numbers = numbers_of_a_step(xp)
    conclude_norm(numbers, put(sums), 0.0, 0, 2.0, 0.5)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(numbers.get()[NORM], np.sqrt(np.add.accumulate(sums)[-1]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_found_on_the_device_and_named(value):
    made = storage(GPU)
    flat, numbers = gradients(made, 1), numbers_of_a_step(xp)
    flat[made.segments[2].start + 4100] = value
    norm = GradientNorm(made.segments)
    norm.conclude(put(flat), numbers, 1.0)
    assert numbers.get()[FOUND] == 1 and numbers.get()[FACTOR] == 1
    assert not math.isfinite(norm(put(flat))) and norm.worst(put(flat)) == '"weight"'
    assert norm.worst(put(gradients(made, 1))) == "some parameter"


def test_ranks_with_parts_fetch_their_sums_at_once_and_find_the_norm_of_the_whole():
    made = storage(GPU)
    flat = gradients(made, 1)
    whole = math.sqrt(squared_norm(made.segments, flat))
    said, added = [None, None], [0.0, 0.0]
    for turn in range(3):                                     # to say what there is, to add it, to hear the sum
        for rank in range(2):
            def gather(value, rank=rank):
                said[rank] = value
                return [one or [] for one in said]

            def add(array, rank=rank):
                same, added[rank] = np.shape(added[rank]) == array.shape, array.copy()
                if same:
                    array[...] = added[0] + added[1]
            channel = SimpleNamespace(size=2, rank=rank, messages=SimpleNamespace(gather_objects=gather),
                                      prepare=lambda array, name, add=add: SimpleNamespace(run=lambda: add(array)))
            norm = GradientNorm(made.segments[rank::2], channel=channel)
            numbers = numbers_of_a_step(xp)
            count = launches(lambda: norm.conclude(put(flat), numbers, 0.0))                 # noqa: B023
            assert count == 2
            if turn == 2:
                assert norm(put(flat)) == numbers.get()[NORM] == whole


def test_norm_clipping_and_update_of_gpt2_are_four_launches_whatever_the_number_of_runs():
    model = models.gpt(layers=12, heads=2, width=16, block=8, vocabulary=11, bias=True)
    made = model.initialize(1, device=GPU)
    optimizer, numbers = AdamW(made, weight_decay=0.1, decay="matrices"), numbers_of_a_step(xp)
    assert len(optimizer.runs(made.segments)) > 90
    norm, flat = GradientNorm(made.segments), put(gradients(made, 1))

    def step():
        norm.conclude(flat, numbers, 1.0)
        optimizer.update(flat, lr=1e-3, step=1, numbers=numbers)
    assert launches(step) == 4


def test_numbers_without_a_place_for_steps_left_out_are_refused() -> None:
    """The kernels would write and read behind them."""
    with pytest.raises(TypeError, match="has 5 numbers"):
        conclude_norm(put(np.ones(5)), put(np.ones(3)), 1.0, 5, 2.0, 0.5)
    with pytest.raises(TypeError, match="has 5 numbers"):
        step_scalars(put(np.ones((1, 9))), np.ones((1, 9)), 1, 0.1, put(np.ones((2, 3))), put(np.ones(5)))
