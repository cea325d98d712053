"""The record of an experiment: every key has its class, and each kind of difference is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpitrain.config import Config, changed
from mpitrain.config.sections import SECTIONS, keys_of
from mpitrain.data import describe
from mpitrain.data.content import BLOCK, difference, identity, sampled_sha256
from mpitrain.data.writing import write_shards
from mpitrain.errors import DataError, UsageError
from mpitrain.train.build import experiment
from mpitrain.train.build.experiment import ARITHMETIC, ELSEWHERE, FREE, ROWS

CLASSES = {"ROWS": ROWS, "ARITHMETIC": ARITHMETIC, "ELSEWHERE": ELSEWHERE, "FREE": FREE}
ABOUT: dict[str, Any] = {"ranks": 1, "machine": "m", "versions": {}, "blas": [], "threads": 1}


@pytest.mark.promise("B9")
def test_every_key_is_in_exactly_one_class() -> None:
    keys = {f"{section}.{key}" for section in SECTIONS for key in keys_of(section)}
    for key in keys:
        found = [name for name, members in CLASSES.items() if key in members]
        assert len(found) == 1, f"{key} is in {found}: put it into one class of mpitrain/train/build/experiment.py"
    assert set().union(*CLASSES.values()) - keys == {"model.block"}, "a key that is no more"


def test_the_classes_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/reproducibility.md").read_text()
    for key in ROWS | ARITHMETIC:
        section = key.partition(".")[0]
        whole = section in ("model", "optimizer", "shrink", "lora", "distil", "average", "privacy")
        assert f"`{key}`" in page or (whole and f"`{section}.*`" in page), key


def record(config: Config, files: dict[str, Any] | None = None, steps: int = 10, **about: Any) -> dict[str, Any]:
    return experiment.record(config, files or {}, {**ABOUT, **about}, steps)


def keys_told(was: dict[str, Any], now: dict[str, Any]) -> dict[str, bool]:
    return {change.key: change.moves_rows for change in experiment.changes(was, now, 5, lambda steps: lambda step: step / steps)}


def other(value: Any) -> Any:
    if value == 0.2:
        return 0.3                           # a share
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, (int, float)) else \
        (*value, 0.5) if isinstance(value, tuple) else {"a": "b"} if isinstance(value, dict) else value + "x"


def test_a_change_of_each_key_is_seen_as_its_class_says() -> None:
    config = changed(Config(), data={"path": "digits"}, model={"name": "mlp", "arguments": {"block": 4, "hidden": [3]}})
    was = record(config)
    assert keys_told(was, was) == {}, "the control"
    for section in SECTIONS:
        for key in keys_of(section):
            now = record(changed(config, **{section: {key: other(getattr(getattr(config, section), key))}}))
            name = f"{section}.{key}"
            expected = {name: name in ROWS} if name in ROWS | ARITHMETIC else {}
            assert keys_told(was, now) == expected, name
    now = record(changed(config, model={"arguments": {"block": 5, "depth": 2}}))
    assert keys_told(was, now) == {"model.block": True, "model.hidden": False, "model.depth": False}


def test_micro_batches_decide_the_bits_where_a_run_is_the_same_on_any_ranks() -> None:
    layout = changed(Config(), train={"reproducible": "layout", "micro_batches": 4})
    assert keys_told(record(layout), record(changed(layout, train={"micro_batches": 8}))) == {"train.micro_batches": True}
    run = changed(layout, train={"reproducible": "run"})
    assert keys_told(record(run), record(changed(run, train={"micro_batches": 8}))) == {"train.micro_batches": False}


def test_another_length_is_a_change_where_the_rate_follows_it() -> None:
    was, now = record(Config()), record(Config(), steps=20)
    assert keys_told(was, now) == {"train.steps": False}
    assert experiment.changes(was, now, 5, lambda steps: lambda step: 0.1) == []


def test_numerics_are_compared_and_threads_on_as_many_ranks_alone() -> None:
    was = record(Config(), versions={"numpy": "2.0"})
    assert keys_told(was, record(Config(), versions={"numpy": "2.1"})) == {"numerics": False}
    assert keys_told(was, record(Config(), versions={"numpy": "2.0"}, threads=2)) == {"numerics": False}
    assert keys_told(was, record(Config(), versions={"numpy": "2.0"}, threads=2, ranks=2)) == {}


def test_a_key_that_a_version_does_not_know_is_not_compared_and_an_argument_is() -> None:
    was = record(Config())
    del was["keys"]["optimizer.eps"]
    assert keys_told(was, record(changed(Config(), optimizer={"eps": 1.0}))) == {}
    assert keys_told(was, record(changed(Config(), optimizer={"arguments": {"trust": 0.1}}))) == {"optimizer.trust": False}


def test_code_of_the_users_is_told_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def f(x): return x\n")
    config = changed(Config(), run={"folder": str(tmp_path)}, data={"transform": ("scale", {"name": "own.py:f", "k": 2})})
    was = record(config)
    assert list(was["code"]) == ["data.transform"] and list(was["code"]["data.transform"]) == ["own.py"]
    (tmp_path / "own.py").write_text("def f(x): return 2 * x\n")
    assert keys_told(was, record(config)) == {"data.transform": False}


def test_names_of_change_are_keys_that_would_be_noticed() -> None:
    experiment.refuse_unknown(["run.seed", "data", "numerics", "optimizer.lr", "model.hidden", "optimizer.trust"])
    for name in ("run.sead", "log.every", "train.cached_mb", "seed", "data.path"):
        with pytest.raises(UsageError, match=name):
            experiment.refuse_unknown([name])


def a_file(path: Path, n: int = 50, first: float = 0.0, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(n * 4, dtype="f4").reshape(n, 4) + first, **options)
        file.create_dataset("y", data=np.arange(n) % 3)
    return path


def told(one: Path, two: Path) -> str:
    return difference(*(json.loads(json.dumps(identity(describe(path)))) for path in (one, two)))


@pytest.mark.promise("C2", "C4")
def test_plain_files_are_told_apart_by_size_layout_and_bytes(tmp_path: Path) -> None:
    base = a_file(tmp_path / "a.h5")
    copy = tmp_path / "moved.h5"
    copy.write_bytes(base.read_bytes())
    assert told(base, copy) == "", "the control: the same bytes in another place"
    assert "bytes then" in told(base, a_file(tmp_path / "b.h5", n=60))
    assert "its bytes are others" in told(base, a_file(tmp_path / "c.h5", first=1.0))
    assert "storage of x was" in told(a_file(tmp_path / "d.h5", n=2000), pad(a_file(tmp_path / "e.h5", n=2000, chunks=(500, 4)),
                                                                          tmp_path / "d.h5"))
    image = bytearray(base.read_bytes())
    image[-1] ^= 1
    (tmp_path / "f.h5").write_bytes(image)
    assert "its bytes are others" in told(base, tmp_path / "f.h5")


def pad(path: Path, like: Path) -> Path:
    """Both files with as many bytes as the larger: zeros behind the end change nothing."""
    size = max(path.stat().st_size, like.stat().st_size)
    for one in (path, like):
        one.write_bytes(one.read_bytes().ljust(size, b"\0"))
    return path


def test_blocks_of_a_large_file_are_spread_from_its_head_to_its_tail(tmp_path: Path) -> None:
    path, size = tmp_path / "large", 8 << 20
    with open(path, "wb") as file:
        file.truncate(size)
    with open(path, "r+b") as file:
        plain = sampled_sha256(file.fileno(), size)
        seen = 0
        for place in (0, size - 1, size // 2, *range(7, size, 20 * BLOCK)):
            file.seek(place)
            file.write(b"x")
            file.flush()
            seen += sampled_sha256(file.fileno(), size) != plain
            file.seek(place)
            file.write(b"\0")
            file.flush()
            if place in (0, size - 1):
                assert seen, place
        assert sampled_sha256(file.fileno(), size) == plain and 3 <= seen < 60
        assert sampled_sha256(file.fileno(), size, 1000) != plain, "of many files fewer blocks each are read"


def test_shards_are_told_by_their_checksums_wherever_they_lie(tmp_path: Path) -> None:
    x, y = np.arange(40, dtype="f4").reshape(10, 4), np.arange(10) % 2
    for name, values in (("one", x), ("two", x), ("other", x + 1)):
        write_shards(tmp_path / name, values, y, kind="classification")
    assert told(tmp_path / "one", tmp_path / "two") == ""
    assert "its bytes are others" in told(tmp_path / "one", tmp_path / "other")


@pytest.mark.promise("F5")
def test_a_shard_that_is_listed_twice_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", np.arange(40, dtype="f4").reshape(10, 4), np.arange(10) % 2, kind="classification")
    assert describe(tmp_path / "set")["kind"], "the control"
    path = tmp_path / "set/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["shards"] *= 2
    del manifest["sha256"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="twice"):
        describe(tmp_path / "set")
