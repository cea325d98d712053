"""Tables of a measured machine: between and beyond what was measured, and the curve of its all-reduces."""

from __future__ import annotations

import copy
from dataclasses import replace
from math import sqrt
from typing import Any

import pytest

from mpitrain.errors import ConfigError
from mpitrain.machines.checks import check_measured
from mpitrain.machines.machine import MachineFile
from mpitrain.machines.measured import at_ranks, beside_others, beyond, layer_seconds, on_curve, slowdown, step_seconds, turns
from mpitrain.schedules.level_times import Level, level_seconds, stream_seconds


def costs(alpha: float) -> dict[str, Any]:
    return {"alpha": alpha, "beta": 1e-9, "gamma": 0.0, "points": [[8.0, alpha], [1024.0, 2 * alpha], [1 << 20, 50 * alpha]]}


def ranks(n: int, turns_taken: float) -> dict[str, Any]:
    return {"step_s": n * 1e-3, "turns": turns_taken, "shared": costs(n * 1e-6), "messages": costs(n * 1e-5),
            "collective_s": 2e-6, "layers": {str(n): [[8.0, 1e-6], [1 << 20, 1e-3]]}}


HERE = MachineFile("here", (Level("node", 0, 1e-6, 1e-9, 0.0),), {"float32": 1e11}, 0.8, 1e10, cores=2, measured={
    "nodes": 1, "by_ranks": {"1": {"step_s": 1e-4, "turns": 1.0}, "2": {**ranks(2, 1.0), "stage_messages": [[8.0, 6e-6]]},
                             "4": ranks(4, 2.1)},
    "contention": {"ranks": [1, 2, 4], "products": [1.0, 1.1, 1.2], "memory": [1.0, 1.5, 1.6], "training": [1.0, 1.1, 1.2]}})


def test_a_number_of_ranks_has_what_was_measured_of_it_or_of_the_next_larger_number() -> None:
    for n, of in ((2, 2), (3, 4), (4, 4), (9, 4)):
        found = at_ranks(HERE, n)
        assert found.levels[0].alpha == of * 1e-6 and found.collective_s == 2e-6
        assert at_ranks(HERE, n, by_messages=True).levels[0].alpha == of * 1e-5
        assert step_seconds(HERE, n) == of * 1e-3
    assert at_ranks(HERE, 2).message_s == pytest.approx((6e-6 - 2e-6) / 2)             # at each end, beyond the level's
    assert [slowdown(HERE, n, "memory") for n in (1, 2, 3, 4, 8)] == [1.0, 1.5, 1.6, 1.6, 1.6]


def test_turns_are_those_of_the_scheduler_where_it_was_measured_and_ranks_over_cores_elsewhere() -> None:
    assert [turns(HERE, n) for n in (1, 2, 3, 4, 8)] == [1.0, 1.0, 1.5, 2.1, 4.0]
    assert [n / at_ranks(HERE, n).cores for n in (2, 4)] == pytest.approx([1.0, 2.1])
    assert turns(replace(HERE, cores=0, measured={}), 8) == 1.0


def test_an_all_reduce_takes_what_the_curve_says_for_as_many_ranks_and_alpha_and_beta_for_others() -> None:
    levels = at_ranks(HERE, 4).levels
    assert level_seconds("all_reduce", 4, 1, 1024, levels) == pytest.approx(8e-6)
    assert level_seconds("all_reduce", 4, 1, sqrt(8 * 1024), levels) == pytest.approx(4e-6 * sqrt(2))      # half-way, in logs
    assert level_seconds("all_reduce", 4, 1, 2 << 20, levels) == pytest.approx(2 * 50 * 4e-6)
    assert level_seconds("all_reduce", 4, 1, 1, levels) == pytest.approx(4e-6)
    plain = (Level("node", 0, 4e-6, 1e-9, 0.0),)
    for operation, n, algorithm in (("all_reduce", 2, "auto"), ("all_reduce", 4, "ring"), ("all_gather", 4, "auto")):
        assert level_seconds(operation, n, 1, 1024, levels, algorithm) == level_seconds(operation, n, 1, 1024, plain, algorithm)


def test_sums_of_layers_have_a_curve_of_their_own_where_they_were_measured() -> None:
    assert layer_seconds(HERE, 4, 4, 8) == 1e-6 and layer_seconds(HERE, 4, 2, 8) is None and layer_seconds(HERE, 3, 3, 8) is None
    assert on_curve([(1.0, 1.0), (4.0, 16.0)], 2.0) == pytest.approx(4.0)


def test_ranks_of_several_hosts_have_the_network_s_costs_and_each_host_its_own() -> None:
    between = {**costs(1e-4), "overlap": 0.7, "step_s": 5e-3}
    two = replace(HERE, levels=(Level("node", 2, 1e-6, 1e-9, 0.0), Level("network", 0, 1e-5, 1e-8, 0.0, 2)),
                  measured={**HERE.measured, "between": between, "nodes": 2})
    found = at_ranks(two, 4)
    assert [level.alpha for level in found.levels] == [2e-6, 1e-4] and found.levels[1].sharing == 2
    assert stream_seconds(2, 2, 1e6, found.levels) is None and stream_seconds(4, 1, 1e6, at_ranks(HERE, 4).levels) is None
    several = replace(two, measured={**two.measured, "between": {**between, "at_once": 3e-9}})
    assert [stream_seconds(*group, 1e6, at_ranks(several, 4).levels) for group in ((2, 2), (2, 1), (4, 1))] == [3e-3, None, None]
    assert level_seconds("all_reduce", 2, 2, 1024, found.levels) == pytest.approx(2e-4)         # one rank of each host
    assert step_seconds(two, 4) == 5e-3 and step_seconds(two, 2) == 2e-3 and 2 / found.cores == 1.0


def test_more_ranks_or_hosts_than_were_measured_are_said_and_so_is_a_crowded_host() -> None:
    assert [beyond(HERE, n) for n in (1, 3, 4)] == [""] * 3 and beyond(replace(HERE, measured={}), 8) == ""
    assert beyond(HERE, 5) == "fitted on 4 ranks of a host, 5 were never measured"
    two = replace(HERE, levels=(Level("node", 2, 1e-6, 1e-9, 0.0), Level("network", 0, 1e-5, 1e-8, 0.0, 2)),
                  measured={**HERE.measured, "between": {}, "nodes": 2})
    assert beyond(two, 4) == "" and beyond(two, 8) == "fitted on 2 hosts, 4 were never measured"
    assert beside_others(HERE) == beside_others(replace(HERE, measured={})) == ""
    busy = replace(HERE, measured={**HERE.measured, "by_ranks": {"1": ranks(1, 1.0), "2": ranks(2, 6.25)}})
    assert beside_others(busy).startswith("2 ranks took 6.2 times their processor time, 1.0 times are expected: other processes")


@pytest.mark.parametrize(("path", "value", "said"), [
    ("by_ranks", "x", 'by_ranks of [measured] is "x"; it should be a table; correct it, or let bench fit --out write'),
    ("by_ranks", {"1": {"step_s": 1e-4, "turns": 1.0}}, "by_ranks of [measured] has nothing of two or more ranks"),
    ("by_ranks", {"two": {}}, 'by_ranks of [measured] has the key "two"; a number of ranks was expected'),
    ("by_ranks.2.step_s", -1.0, "step_s of by_ranks.2 of [measured] is -1.0; it should be a number, 0 or more"),
    ("by_ranks.2.shared", None, "shared of by_ranks.2 of [measured] is"),
    ("by_ranks.2.shared.points", [], "points of shared of by_ranks.2 of [measured] is []; it should be a list of [bytes,"),
    ("by_ranks.2.shared.points", [[0, 0.5]], "a number of points of shared of by_ranks.2 of [measured] is 0; it"),
    ("by_ranks.2.messages.points", [[8.0, 1.0], [8.0, 2.0]], "the bytes of points of messages of by_ranks.2 of [measured]"),
    ("by_ranks.4.layers.4", [[8.0, float("nan")]], "a number of layers.4 of by_ranks.4 of [measured] is nan"),
    ("contention", {"ranks": []}, "ranks of contention of [measured] is []; it should be a list of numbers of ranks"),
    ("contention.training", ["x"], "training of contention of [measured] is"),
    ("contention.memory", [1, 1, "x"], 'a number of memory of contention of [measured] is "x"; it should be a number'),
    ("operation_s", "x", 'operation_s of [measured] is "x"; it should be a number, 0 or more'),
    ("between", {"alpha": 1.0}, "beta of between of [measured] is missing"),
])
def test_tables_that_a_plan_would_misread_are_refused_by_their_keys(path: str, value: object, said: str) -> None:
    measured: Any = copy.deepcopy(dict(HERE.measured))
    check_measured(measured, None)
    *above, key = path.split(".")
    table = measured
    for name in above:
        table = table[name]
    table[key] = value
    with pytest.raises(ConfigError) as caught:
        check_measured(measured, None)
    assert said in str(caught.value)
