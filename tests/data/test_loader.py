"""Micro-batches: the same samples on any number of ranks, in order, checked, read ahead, and ended cleanly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_inputs import features
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain import nn
from mpitrain.data import (
    Dataset,
    Loader,
    MicroBatch,
    Sampler,
    Transforms,
    augmentations,
    describe,
    scan_labels,
    scan_targets,
    token_split,
    write_shards,
)
from mpitrain.data.loader import SampleReader
from mpitrain.errors import ConfigError, DataError
from mpitrain.train.build import inputs

pytestmark = pytest.mark.usefixtures("one_parser")

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    x = features(203, 1, 8, 8)
    return Dataset(describe(write_shards(tmp_path_factory.mktemp("d") / "out", x, np.arange(203) % 7, kind="classification",
                                              shard_rows=50)))


def ranks(dataset: Dataset, n: int, n_micro: int, batch: int, steps: range, **options: Any) -> dict[tuple[int, int], MicroBatch]:
    """What n ranks together load, by (step, micro-batch)."""
    found = {}
    for r in range(n):
        with closing(Loader(dataset, Sampler(203, batch, seed=3, drop_last=False), n_micro, r * n_micro // n,
                            (r + 1) * n_micro // n, augment=augmentations(["flip", "crop"]), **options)) as loader:
            for step, micro_batches in loader.iterate(steps.start, steps.stop):
                for m in micro_batches:
                    assert (step, m.index) not in found and m.step == step
                    found[step, m.index] = m
    return found


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.promise("C8")
def test_any_number_of_ranks_loads_the_same_micro_batches(dataset: Dataset, n: int) -> None:
    steps = range(3, 18)                              # over two ends of epochs, with a short last batch of 3 rows
    alone, together = (ranks(dataset, k, 4, 20, steps) for k in (1, n))
    assert alone.keys() == together.keys()
    for place, m in alone.items():
        other = together[place]
        assert np.array_equal(m.samples, other.samples) and (m.index, m.first) == (other.index, other.first)
        assert np.array_equal(m.x, other.x) and np.array_equal(m.y, other.y)


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 60), n_micro=st.integers(1, 9), step=st.integers(0, 30))
def test_micro_batch_i_is_its_share_of_the_global_batch(dataset: Dataset, batch: int, n_micro: int, step: int) -> None:
    sampler = Sampler(203, batch, seed=1, drop_last=False)
    rows = sampler.rows(step)
    found = Loader(dataset, sampler, n_micro).load(step)
    assert np.array_equal(np.concatenate([m.samples for m in found]), rows)
    for m in found:
        low, high = m.index * len(rows) // n_micro, (m.index + 1) * len(rows) // n_micro
        assert m.first == low and len(m) == high - low > 0 and np.array_equal(m.samples, rows[low:high])
    assert len(found) == sum((i + 1) * len(rows) // n_micro > i * len(rows) // n_micro for i in range(n_micro))


def test_a_rank_whose_micro_batches_are_empty_gets_an_empty_step(dataset: Dataset) -> None:
    sampler = Sampler(203, 20, drop_last=False)
    loader = Loader(dataset, sampler, 8, 0, 2)        # the last batch has 3 rows: 0*3/8, 1*3/8, 2*3/8 are all 0
    assert loader.load(sampler.steps_per_epoch - 1) == []


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_threads_change_nothing_and_resuming_continues_the_stream(dataset: Dataset, workers: int) -> None:
    def stream(start: int, stop: int) -> list[np.ndarray]:
        with closing(Loader(dataset, Sampler(203, 32, seed=9), 2, workers=workers, depth=4)) as loader:
            return [np.concatenate([m.x for m in micro]) for _, micro in loader.iterate(start, stop)]
    whole = stream(0, 20)
    want = [dataset.read(Sampler(203, 32, seed=9).rows(s))[0] for s in range(20)]
    assert all(np.array_equal(a, b) for a, b in zip(whole, want))
    assert all(np.array_equal(a, b) for a, b in zip(stream(13, 20), whole[13:]))


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_steps_are_read_ahead_than_said(dataset: Dataset, depth: int) -> None:
    with closing(Loader(dataset, Sampler(203, 32), 1, workers=1, depth=depth)) as loader:
        asked: list[int] = []
        load = loader.load
        loader.load = lambda step: asked.append(step) or load(step)     # type: ignore[func-returns-value,method-assign]
        for step, _ in loader.iterate(0, 6):
            assert step in asked and max(asked) <= step + depth - 1


def test_steps_are_read_ahead_while_the_consumer_works(dataset: Dataset) -> None:
    loader = Loader(dataset, Sampler(203, 32), 1, workers=1, depth=2)
    loaded, load = threading.Event(), loader.load

    def watched(step: int) -> list[MicroBatch]:
        if step == 1:
            loaded.set()
        return load(step)
    loader.load = watched                             # type: ignore[method-assign]
    steps = loader.iterate()
    next(steps)
    assert loaded.wait(30)                            # step 1 is read though nobody has asked for it
    loader.close()


def test_an_error_in_a_thread_reaches_the_consumer_with_its_step(plain_file: Write) -> None:
    x = features(40, 3)
    x[33, 1] = np.inf
    dataset = Dataset(describe(plain_file(x=x, y=np.arange(40) % 3)))
    with closing(Loader(dataset, Sampler(40, 8, shuffle=False), 1, workers=2)) as loader:
        steps = loader.iterate()
        assert [next(steps)[0] for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(DataError, match="value 1 of this row is inf; remove") as caught:
            next(steps)
    error = caught.value
    assert (error.step, error.row, error.dataset, error.file) == (4, 33, "/x", str(dataset.shards[0]["file"]))


def test_an_augmentation_that_fails_is_named_with_its_step(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text('def fails(x, keys): return {}["here"]')
    loader = Loader(dataset, Sampler(203, 20, seed=3), 4, augment=augmentations("own.py:fails", tmp_path), workers=0)
    with pytest.raises(ConfigError, match=r'data.augment "own.py:fails" failed: KeyError at own.py:1 in fails: .here') as caught:
        loader.load(7)
    assert caught.value.step == 7


def test_closing_ends_the_threads(dataset: Dataset) -> None:
    before = threading.active_count()
    loader = Loader(dataset, Sampler(203, 32), 1, workers=3)
    next(loader.iterate())
    assert threading.active_count() > before
    loader.close()
    assert threading.active_count() == before


def test_transforms_are_applied_before_augmentation(dataset: Dataset) -> None:
    transforms = Transforms("standardise")
    transforms.fit(dataset, range(203))
    loader = Loader(dataset, Sampler(203, 10, seed=2), 1, transforms=transforms)
    (m,) = loader.load(0)
    assert np.array_equal(m.x, transforms(dataset.read(m.samples)[0]))


@pytest.mark.parametrize(("label", "row"), [(7, 0), (-1, 39), (200, 17)])
@pytest.mark.promise("C6")
def test_a_label_out_of_range_is_found_with_file_and_row(tmp_path: Path, label: int, row: int) -> None:
    y = np.arange(40) % 7
    y[row] = label
    folder = write_shards(tmp_path / "out", features(40, 3), y, kind="classification", shard_rows=15)
    dataset = Dataset(describe(folder))
    want = rf"label {label} is outside 0..6 \(7 classes\); correct the data"
    with pytest.raises(DataError, match=want) as scanned:
        scan_labels(dataset, 7)
    with closing(Loader(dataset, Sampler(40, 40), 1, n_classes=7)) as loader, pytest.raises(DataError, match=want) as caught:
        next(loader.iterate())
    for error in (scanned.value, caught.value):
        assert error.row == row % 15 and error.dataset == "/y"
        assert error.file == str(folder / f"shard-{row // 15:05d}.h5")


@pytest.mark.parametrize(("loss", "row", "value", "wanted"), [
    ("binary_cross_entropy", 17, 1.5, "a target is 1.5, and train.loss (BinaryCrossEntropy) wants 0 to 1;"),
    ("hinge_embedding", 39, 2.0, "wants 1 or -1;"), ("margin_ranking", 0, 0.0, "a target is 0, "),
    ("poisson_nll", 3, -0.5, "wants 0 or more;"), ("kl", 0, -1.0, "wants 0 or more;")])
@pytest.mark.promise("C6")
def test_a_target_out_of_the_loss_s_range_is_found_with_file_and_row(tmp_path: Path, loss: str, row: int, value: float,
                                                                    wanted: str) -> None:
    y = np.ones((40, 2), np.float32)
    folder = write_shards(tmp_path / "good", features(40, 3), y, kind="regression")
    scan_targets(Dataset(describe(folder)), nn.LOSSES[loss]())
    y[row, 1] = value
    folder = write_shards(tmp_path / "out", features(40, 3), y, kind="regression", shard_rows=15)
    scan_targets(Dataset(describe(folder)), nn.LOSSES["mse"]())
    with pytest.raises(DataError) as scanned:
        scan_targets(Dataset(describe(folder)), nn.LOSSES[loss]())
    assert wanted in str(scanned.value) and (scanned.value.row, scanned.value.dataset) == (row % 15, "/y")
    assert scanned.value.file == str(folder / f"shard-{row // 15:05d}.h5")


@pytest.mark.parametrize(("x", "y", "wanted"), [
    (features(9, 4), np.arange(9), "rows of float32 4, but the training data (shard-00000.h5) have rows of float32 3;"),
    (features(9, 3), features(9), "rows of float32 scalar, but"),
    (features(9, 3).astype("f8"), np.arange(9, dtype="u1"), ""), (features(9, 3).astype("u1"), np.arange(9), "")])
def test_validation_rows_that_are_not_like_the_training_rows_name_their_file(tmp_path: Path, x: Any, y: Any, wanted: str) -> None:
    write_shards(tmp_path / "out", features(40, 3), np.arange(40), kind="classification")
    other = write_shards(tmp_path / "other", x, y, kind="classification" if y.dtype.kind in "iu" else "regression")
    asked = (str(tmp_path / "out"), "other", tmp_path, "", "")
    if not wanted:
        assert inputs.describe_files(*asked)["validation"]["path"] == str(other)
        return
    with pytest.raises(DataError) as refused:
        inputs.describe_files(*asked)
    assert wanted in str(refused.value) and str(other / "shard-00000.h5") in str(refused.value)


def test_scanning_counts_the_classes_and_refuses_negative_labels(dataset: Dataset, plain_file: Write) -> None:
    assert scan_labels(dataset) == 7
    with pytest.raises(DataError, match="label -5 is outside"):
        scan_labels(Dataset(describe(plain_file(x=features(4, 2), y=np.full(4, -5)))))


def test_tokens_outside_the_vocabulary_are_found_but_padding_is_not_taken_for_them(tmp_path: Path) -> None:
    values = np.arange(100, dtype="u1") % 10
    values[71] = 30
    dataset = Dataset(describe(write_shards(tmp_path / "out", values, kind="tokens")))
    assert scan_labels(dataset) == 31
    training, validation = token_split(dataset, 8, "tail:0.2")
    with pytest.raises(DataError, match=r"token 30 is outside 0..9"):
        list(Loader(training, Sampler(len(training), 4, shuffle=False), 1, n_classes=10).iterate(0, 18))
    assert validation is not None
    assert (SampleReader(validation, n_classes=10).read(np.arange(len(validation)))[1] == -1).sum() == 24 - 19


@pytest.mark.promise("C6")
def test_nan_in_a_regression_target_is_found(plain_file: Write) -> None:
    y = np.arange(9.0)
    y[4] = np.nan
    dataset = Dataset(describe(plain_file(x=features(9, 2), y=y)))
    with pytest.raises(DataError, match="value 0 of this row is nan") as caught:
        SampleReader(dataset).read(np.arange(9))
    assert (caught.value.row, caught.value.dataset) == (4, "/y")


def test_large_finite_values_are_not_taken_for_infinite(plain_file: Write) -> None:
    x = np.full((9, 2), 1.7e308)                      # their sum overflows
    read, _ = SampleReader(Dataset(describe(plain_file(x=x, y=np.arange(9.0))))).read(np.arange(9))
    assert np.array_equal(read, x)


def test_evaluation_reads_every_row_once_in_chunks_of_one_size(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "EVALUATION_CHUNK", 16)
    rows = np.random.default_rng(0).permutation(203)
    read, n = inputs.Inputs(dataset, rows, dataset, rows, Transforms()).chunks(None)
    found = [read(chunk) for chunk in range(n)]
    assert [len(x) for x, _ in found] == [16] * 12 + [11]
    for part in range(2):
        assert np.array_equal(np.concatenate([pair[part] for pair in found]), dataset.read(rows)[part])
