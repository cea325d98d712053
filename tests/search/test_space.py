"""Spaces: forms, their values, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.errors import ConfigError
from mpitrain.search.space import Dimension, read_space

FORMS = [{"log": [1e-4, 1e-1]}, {"uniform": [-1.5, 2.0]}, {"integer": [32, 250], "step": 32},
         {"choices": [[64], [128, 64], "a", 1]}]


def dimension(form: Any) -> Dimension:
    return read_space({"a.b": form}).dimensions["a.b"]


@pytest.mark.parametrize("form", FORMS)
@given(u=st.floats(0, 1, exclude_max=True), move=st.floats(0, 1, exclude_max=True))
def test_every_value_is_in_its_range_and_a_mutation_is_another_one(form: Any, u: float, move: float) -> None:
    made = dimension(form)
    value = made.at(u)
    assert made.holds(value)
    again = made.at(min(made.place(value), math.nextafter(1, 0)))
    assert again == value or math.isclose(again, value, rel_tol=1e-9, abs_tol=1e-9)
    changed = made.mutated(value, move)
    assert made.holds(changed) and (made.count is None or changed != value)


def test_values_are_where_the_formulas_put_them() -> None:
    assert dimension({"log": [1e-4, 1e-2]}).at(0.5) == pytest.approx(1e-3) and dimension({"log": [1e-4, 1e-2]}).at(0) == 1e-4
    assert dimension({"uniform": [2, 4]}).at(0.25) == 2.5
    steps = dimension({"integer": [32, 250], "step": 32})
    assert [steps.at(i / 7) for i in range(7)] == [32, 64, 96, 128, 160, 192, 224] and steps.ends() == [32, 224]
    assert dimension({"choices": [1, True, 1.0]}).count == 3                     # three types, three choices


def test_a_mutation_of_a_range_of_a_million_million_integers_lists_none_of_them() -> None:
    wide = dimension({"integer": [0, 10 ** 12]})
    assert wide.mutated(10 ** 6, 0.0) == 0 and wide.mutated(10 ** 12, 0.999999) < 10 ** 12
    small = dimension({"integer": [1, 10]})
    assert [small.mutated(5, u) for u in (0.0, 0.3, 0.5, 0.9)] == [3, 4, 6, 7]


def test_values_of_a_users_sampler_are_kept_as_plain_ones() -> None:
    space = read_space({"a.b": {"choices": [[64], [128, 64]]}})
    assert type(space.refuse({"a.b": [np.int64(64)]}, "mine")["a.b"][0]) is int


def test_keys_may_stand_in_tables_of_their_sections() -> None:
    assert list(read_space({"optimizer": {"lr": {"log": [1e-4, 1e-1]}}}).dimensions) == ["optimizer.lr"]


@pytest.mark.parametrize(("form", "told"), [
    ({"log": [0.0, 1.0]}, "logarithm of 0.0"), ({"log": [1, -1]}, "low must not be above high"),
    ({"log": [1]}, "two finite numbers"),
    ({"uniform": [0.5, 0.1]}, "low must not be above high, found uniform = [0.5, 0.1]; write [0.1, 0.5]"),
    ({"log": [1e-300, 1e300]}, "too far apart"), ({"uniform": [-1.5e308, 1.5e308]}, "too far apart"),
    ({"uniform": [0, math.inf]}, "two finite numbers"), ({"uniform": ["a", "b"]}, "two finite numbers"),
    ({"choices": []}, "at least one value"), ({"choices": 3}, "at least one value"), ({"choices": [1, 2, 1]}, "has 1 twice"),
    ({"integer": [1, 2.5]}, "must be of integers, found 2.5"), ({"integer": [1, 8], "step": 0}, "step must be at least 1"),
    ({"integer": [1, 8], "stpe": 2}, 'unknown key stpe (did you mean "step"?)'), ({"log": [1, 2], "step": 1}, "unknown key step"),
    ({"logg": [1, 2]}, "must be one of"), ([1, 2], "must be one of"), ({"log": [1, 2], "uniform": [1, 2]}, "must be one of")])
def test_a_form_that_is_wrong_is_refused_in_one_line(form: Any, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        dimension(form)
    assert told in str(error.value) and '[space] "a.b"' in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("given_values", "told"), [
    (3, "a value for each key"), ({"a.b": 1, "a.c": 1}, 'gave a value for "a.c"'), ({}, 'no value for "a.b"'),
    ({"a.b": 9}, "outside of [space]"), ({"a.b": True}, "outside of [space]")])
def test_values_of_a_users_sampler_are_looked_at(given_values: Any, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_space({"a.b": {"integer": [1, 8]}}).refuse(given_values, "mine")
    assert told in str(error.value)
