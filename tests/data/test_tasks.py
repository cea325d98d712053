"""Tasks of tokens: masked tokens by BERT's rule, hidden spans by T5's, keyed by the row."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.data.keyed import sample_keys
from mpitrain.data.tasks import TASKS, Tasks, span_sizes
from mpitrain.data.tokens import IGNORE
from mpitrain.errors import ConfigError, ShapeError

MASK, OTHERS = 50, 50


def windows(rows: int, length: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    text = np.random.default_rng(seed).integers(0, OTHERS, (rows, length + 1))
    return text[:, :-1].copy(), text[:, 1:].copy()


def keys(rows: int, base: int = 7) -> np.ndarray:
    return sample_keys(base, np.arange(rows))


def test_15_of_100_tokens_are_chosen_and_of_10_of_these_8_are_hidden_and_1_is_another():
    x, y = windows(400, 250)
    inputs, targets = TASKS["mask"](x, y, keys(400), token=MASK)
    chosen = targets != IGNORE
    n = chosen.sum()
    assert n / x.size == pytest.approx(0.15, abs=4 * (0.15 * 0.85 / x.size) ** 0.5)
    np.testing.assert_array_equal(targets[chosen], x[chosen])
    np.testing.assert_array_equal(inputs[~chosen], x[~chosen])
    hidden, same = (inputs == MASK) & chosen, (inputs == x) & chosen
    assert hidden.sum() / n == pytest.approx(0.8, abs=0.02)
    assert same.sum() / n == pytest.approx(0.1 + 0.1 / OTHERS, abs=0.015)             # another token may be the same by chance
    drawn = inputs[chosen & ~hidden & ~same]
    assert drawn.min() == 0 and drawn.max() == OTHERS - 1
    by_place = chosen.mean(axis=0)
    assert by_place.min() > 0.08 and by_place.max() < 0.23                            # no place is left out


def test_a_task_depends_on_its_row_alone():
    x, y = windows(8, 40)
    for name, arguments in (("mask", {"token": MASK}), ("spans", {"sentinel": 60, "end": 61})):
        whole = TASKS[name](x, y, keys(8), **arguments)
        for part in (slice(0, 3), slice(3, 8)):
            for some, all_ in zip(TASKS[name](x[part], y[part], keys(8)[part], **arguments), whole):
                np.testing.assert_array_equal(some, all_[part])
        assert (TASKS[name](x, y, keys(8, base=8), **arguments)[0] != whole[0]).any()


def test_epochs_differ_and_validation_has_masks_of_its_own():
    task, (x, y), rows = Tasks([{"name": "mask", "token": MASK}], seed=3), windows(6, 40), np.arange(6)
    first, again, second, held_out = (task(x, y, rows, epoch)[1] for epoch in (0, 0, 1, None))
    np.testing.assert_array_equal(first, again)
    assert (first != second).any() and (first != held_out).any()


def test_what_is_no_text_is_not_hidden():
    x, y = windows(50, 30)
    y[:, 20:] = IGNORE
    inputs, targets = TASKS["mask"](x, y, keys(50), token=MASK, probability=0.9, keep=[0, 1, 2])
    assert (targets[:, 20:] == IGNORE).all() and not np.isin(targets, [0, 1, 2]).any()
    np.testing.assert_array_equal(inputs[:, 20:], x[:, 20:])


@pytest.mark.parametrize(("length", "density", "mean"), [(568, 0.15, 3.0), (20, 0.15, 3.0), (11, 0.5, 1.0), (2, 0.5, 3.0)])
def test_source_and_answer_of_spans_make_the_text_again(length, density, mean):
    x, y = windows(30, length)
    sentinel, end, begin = 900, 950, 951
    inputs, answers = TASKS["spans"](x, y, keys(30), sentinel=sentinel, end=end, begin=begin, density=density, mean=mean)
    hidden, runs, source = span_sizes(length, density, mean)
    assert inputs.shape == (30, source + hidden + runs + 1) and answers.shape == (30, hidden + runs + 1)
    for row, given, answer in zip(x, inputs, answers):
        np.testing.assert_array_equal(given[source:], [begin, *answer[:-1]])
        assert given[source - 1] == answer[-1] == end
        said: dict[int, list[int]] = {}
        for token in answer[:-1]:
            if token > 100:
                said[token] = last = []
            else:
                last.append(token)
        assert list(said) == [sentinel - k for k in range(runs)] and all(said.values())
        text = [token for one in given[:source - 1] for token in (said[one] if one > 100 else [one])]
        np.testing.assert_array_equal(text, row)


def test_t5_s_sizes_of_spans():
    assert span_sizes(568) == (85, 28, 512)                       # 512 and 114 tokens, as in the paper's code


@pytest.mark.parametrize(("asked", "error", "words"), [
    ("flip", ConfigError, 'unknown task of tokens "flip"'),
    ("mask", ConfigError, "token"),
    ({"name": "mask", "token": 5, "chance": 1}, ConfigError, "has no data.augment.chance"),
    ({"name": "mask", "token": -1}, ConfigError, "token is the number of a token"),
    ({"name": "mask", "token": 5, "probability": 1.5}, ConfigError, "probability lies between 0 and 1, found 1.5"),
    ({"name": "mask", "token": 0}, ConfigError, "vocabulary is 0"),
    ({"name": "spans", "sentinel": 0, "end": 3}, ConfigError, "runs want sentinels 0"),
    ({"name": "spans", "sentinel": 9, "end": 3, "mean": 0.5}, ConfigError, "both must be larger")])
def test_tasks_that_do_not_fit_are_named(asked, error, words):
    x, y = windows(2, 12)
    with pytest.raises(error, match=words):
        Tasks([asked], 0)(x, y, np.arange(2), 0)


def test_a_task_of_the_user_s_that_loses_rows_is_named(tmp_path):
    (tmp_path / "own.py").write_text("def short(x, y, keys):\n    return x[:1], y\n\ndef none(x, y, keys):\n    pass\n")
    x, y = windows(2, 5)
    with pytest.raises(ShapeError, match=r"must return as many rows as it gets, 2, found the shapes \(1, 5\)"):
        Tasks(["own.py:short"], 0, tmp_path)(x, y, np.arange(2), 0)
    with pytest.raises(ConfigError, match="must return two arrays, inputs and targets, found None"):
        Tasks(["own.py:none"], 0, tmp_path)(x, y, np.arange(2), 0)
