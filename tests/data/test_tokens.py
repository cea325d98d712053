"""Windows over tokens: training starts anywhere, validation counts every token once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.data import Dataset, TokenWindows, describe, token_split, write_shards
from mpitrain.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    values = np.random.default_rng(0).integers(0, 65, 500).astype("u1")
    return Dataset(describe(write_shards(tmp_path_factory.mktemp("t") / "out", values, kind="tokens", shard_rows=180)))


def raw(tokens: Dataset) -> np.ndarray:
    return tokens.read_field(tokens.x, np.arange(len(tokens)))


@settings(max_examples=40, deadline=None)
@given(block=st.integers(1, 40), stride=st.integers(1, 30), stop=st.integers(60, 500))
def test_training_windows_are_all_that_fit(tokens: Dataset, block: int, stride: int, stop: int) -> None:
    values = raw(tokens)[:stop].astype(np.int64)
    expected = [values[s:s + block + 1] for s in range(0, stop - block, stride)]
    windows = TokenWindows(tokens, block, stride=stride, stop=stop)
    x, y = windows.read(np.arange(len(windows)))
    assert np.array_equal(x, [w[:-1] for w in expected]) and np.array_equal(y, [w[1:] for w in expected])
    assert x.dtype == y.dtype == np.int64


@settings(max_examples=40, deadline=None)
@given(block=st.integers(1, 64), start=st.integers(0, 498))
def test_validation_predicts_every_token_but_the_first_exactly_once(tokens: Dataset, block: int, start: int) -> None:
    values = raw(tokens)[start:]
    windows = TokenWindows(tokens, block, start=start, cover=True)
    x, y = windows.read(np.arange(len(windows)))
    counted = y != -1
    assert np.array_equal(y[counted], values[1:]) and np.array_equal(x[counted], values[:-1])
    assert not x[~counted].any() and counted[:-1].all()


def test_the_split_is_at_nine_tenths_and_shares_no_token(tokens: Dataset) -> None:
    training, validation = token_split(tokens, 16, "tail:0.1")
    assert validation is not None and (training.stop, validation.start, validation.stop) == (450, 450, 500)
    assert len(training) == 434 and len(validation) == 4
    assert token_split(tokens, 16, 0)[1] is None


def test_windows_cross_shards_and_say_where_they_start(tokens: Dataset) -> None:
    windows = TokenWindows(tokens, 20, stride=10)
    x, _ = windows.read(np.array([17]))
    assert np.array_equal(x[0], raw(tokens)[170:190])
    assert windows.where(17) == (tokens.shards[0]["file"], 170) and windows.where(18)[1] == 0


def test_what_cannot_be_windows_is_refused(tokens: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='random rows would be seen in training; use "tail:0.1"'):
        token_split(tokens, 16, 0.1)
    with pytest.raises(DataError, match="450 tokens for training, but one window takes 461"):
        token_split(tokens, 460, "tail:0.1")
    with pytest.raises(ConfigError, match="data.stride >= 1, not 16 and 0"):
        TokenWindows(tokens, 16, stride=0)
    rows = Dataset(describe(write_shards(tmp_path / "o", np.zeros((9, 2)), np.zeros(9), kind="regression")))
    with pytest.raises(DataError, match="expected a 1-D dataset of tokens, found data for regression"):
        TokenWindows(rows, 3)
    with pytest.raises(DataError, match="read as windows of tokens"):
        tokens.read(np.array([1]))
