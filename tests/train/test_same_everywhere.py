"""Ranks that were started with something different are told what, before any data are read."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from launch import ROOT, Job, Result, clean_environment, find_mpirun
from runs import SMALL, record, write

from mpitrain.comm.job.together import mismatch
from mpitrain.kernels.kernel import kind

EACH = (sys.executable, "-m", "mpitrain", "train", "run.name=x", "run.folder=.", "run.out=a", "train.steps=3")


def each(tmp_path: Path, *others: tuple[str, ...], config: str = "run.toml", env: tuple[str, ...] = ()) -> Result:
    """A run on three ranks; rank 1 gets `others` after its command, in its own environment."""
    config_of = (*EACH[:4], str(tmp_path / config), *EACH[4:])
    command = [find_mpirun(), "-n", "1", *config_of, ":", "-n", "1", *env, *config_of, *(w for words in others for w in words),
               ":", "-n", "1", *config_of]
    return Job(command, clean_environment(), tmp_path).finish(60)


def refused(result: Result, words: str) -> None:
    assert result.rc == 76 and len(result.error_lines) == 1, (result.rc, result.out, result.err)
    assert result.error_lines[0].startswith("mpitrain: E_MISMATCH rank=0/3 host=") and words in result.error_lines[0], result.err


@pytest.mark.promise("A7")
def test_a_key_of_the_configuration_is_named_with_both_values_and_their_ranks(tmp_path: Path) -> None:
    write(tmp_path)
    refused(each(tmp_path, ("optimizer.lr=0.3",)),
            ": optimizer.lr is 0.003 on ranks 0, 2 and 0.3 on rank 1: start all ranks with one")
    refused(each(tmp_path, ("train.precision=float64", "run.seed=4")),
            ': run.seed is 0 on ranks 0, 2 and 4 on rank 1 (and 1 more differ: train.precision): start')
    assert not (tmp_path / "a").exists()
    assert each(tmp_path).rc == 0 and record(tmp_path / "a")["status"] == "done"


@pytest.mark.promise("A7")
def test_a_file_of_the_users_code_is_named(tmp_path: Path) -> None:
    write(tmp_path, SMALL.replace('schedule = "cosine"', 'schedule = "mine.py:rate"'))
    (tmp_path / "mine.py").write_text("def rate(*, lr, min_lr, warmup_steps, total_steps):\n    return lambda step: lr\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine.py").write_text((tmp_path / "mine.py").read_text() + "\n")
    refused(each(tmp_path, env=("-wdir", str(tmp_path / "other"))), ": the file mine.py (SHA-256) is ")
    assert each(tmp_path).rc == 0


@pytest.mark.promise("A7")
def test_another_mpitrain_on_one_rank_is_named_by_its_first_file_that_differs(tmp_path: Path) -> None:
    write(tmp_path)
    shutil.copytree(ROOT / "mpitrain", tmp_path / "other/mpitrain")
    (tmp_path / "other/native").symlink_to(ROOT / "native")
    with open(tmp_path / "other/mpitrain/optim/rules.py", "a") as file:
        file.write("# another program\n")
    refused(each(tmp_path, env=("-x", f"PYTHONPATH={tmp_path / 'other'}")), ": the source mpitrain/optim/rules.py (SHA-256) is ")


def test_values_are_shown_where_they_differ() -> None:
    one, two = "x" * 90 + "1" + "y" * 90, "x" * 90 + "2" + "y" * 90
    said = mismatch(["a.b"], [{"a.b": one}, {"a.b": two}, {"a.b": one}, {}])
    cut = "..." + "x" * 20, "y" * 39 + "..."
    assert said.startswith(f"a.b is {cut[0]}1{cut[1]} on ranks 0, 2, {cut[0]}2{cut[1]} on rank 1 and absent on rank 3: start")


def test_other_kernels_on_one_rank_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    other = "numpy" if kind() != "numpy" else "c"
    refused(each(tmp_path, env=("-x", f"MPITRAIN_KERNELS={other}")), ": what kernels run as (MPITRAIN_KERNELS) is ")
