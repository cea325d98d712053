"""Each mistake a user can make: one line that names the place, an exit status, every rank ended, nothing lost."""

from __future__ import annotations

import os
import signal
import sys

import h5py
import numpy as np
import pytest
import runs
from launch import ROOT, Job, clean_environment, find_mpirun, mpirun
from psutil import Process
from runs import SMALL, lines, record, start, write
from standing import train

from mpitrain.checkpoint import folders, store
from mpitrain.checkpoint.manifest import load
from mpitrain.data.importers import import_text


def refused(result, status, *words):
    """The job ended with `status` and one line that holds all `words`."""
    assert result.rc == status, result.out + result.err
    assert len(result.error_lines) == 1, result.err
    for word in words:
        assert word in result.error_lines[0], result.error_lines[0]
    assert "Traceback" not in result.err + result.out
    return result


def dataset(folder, name="d.h5", rows=200, **changes):
    """A plain HDF5 file of 64 features and 10 classes, with `changes` to its values."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((rows, 64)).astype(np.float32), rng.integers(0, 10, rows)
    for (which, row), value in changes.get("values", {}).items():
        (x if which == "x" else y)[row] = value
    with h5py.File(folder / name, "w") as file:
        file["x"], file["y"] = x, y
    return folder / name


def corpus(folder):
    path = folder / "corpus.txt"
    path.write_text("".join(f"the quick brown fox jumps over the lazy dog {n}\n" for n in range(50)))
    return path


def plain(folder, **changes):
    dataset(folder, **changes)
    return write(folder, SMALL.replace('path = "digits"', 'path = "d.h5"\nx = "x"\ny = "y"\nvalidation = "tail:0.2"'))


@pytest.mark.promise("F2")
def test_an_unknown_key_is_one_line_from_one_rank(tmp_path):
    refused(train(3, write(tmp_path), "train.batchsize=3"), 78, "E_CONFIG", "train.batchsize", 'did you mean "batch_size"')


def test_an_unknown_flag_is_a_usage_error(tmp_path):
    refused(train(2, write(tmp_path), "--fast"), 64, "E_USAGE", "--fast")


def test_a_mesh_that_does_not_fit_the_ranks(tmp_path):
    refused(train(3, write(tmp_path), "mesh.dp=2"), 78, "E_MESH", "needs 2 ranks, found 3", "set mesh.dp=3")


def test_more_ranks_than_micro_batches(tmp_path):
    refused(train(3, write(tmp_path), "train.micro_batches=2"), 78, "E_MESH", "3 data-parallel ranks share 2 micro-batches")


@pytest.mark.promise("C8")
def test_more_ranks_than_rows_in_a_batch(tmp_path):
    refused(train(3, write(tmp_path), "train.batch_size=2"), 78, "E_MESH", "3 micro-batches of a global batch of 2")


def test_a_model_argument_that_does_not_exist(tmp_path):
    refused(train(2, write(tmp_path), "model.hiden=[3]"), 78, "model.hiden", 'did you mean "hidden"')


@pytest.mark.parametrize(("key", "found"), [("comm.bucket_mb", "0"), ("model.hidden", "0"), ("model.outputs", "0"),
                                            ("model.inputs", "0")])
def test_a_size_of_nothing(tmp_path, key, found):
    refused(train(2, write(tmp_path), f"{key}=0"), 78, "E_CONFIG", f"{key} must be", f"found {found}")


@pytest.mark.parametrize("value", ["0", pytest.param("abc", marks=pytest.mark.slow), pytest.param("1.5", marks=pytest.mark.slow)])
def test_a_window_of_tokens_that_is_no_length(tmp_path, value):
    import_text(corpus(tmp_path), tmp_path / "tokens")
    text = """
[model]
name = "gpt"
layers = 1
heads = 2
width = 8
block = 8
vocabulary = 64
[data]
path = "tokens"
validation = "tail:0.2"
[train]
steps = 2
batch_size = 4
"""
    config = write(tmp_path, text)
    refused(train(1, config, f"model.block={value}"), 78, "E_CONFIG", "model.block must be an integer of at least 1", "found")


def test_an_unknown_model_optimizer_loss_and_transform(tmp_path):
    config = write(tmp_path)
    for key, word in (("model.name=resnet21", "did you mean"), ("optimizer.name=adam2", "adam"),
                      ("train.loss=ce", "cross_entropy"),
                      ("data.transform=scal", "scale"), ("optimizer.schedule=cosin", "cosine")):
        refused(train(1, config, key), 78, "E_CONFIG", word)


def test_a_missing_file(tmp_path):
    refused(train(2, write(tmp_path), "data.path=nothing.h5"), 66, "E_MISSING", "nothing.h5")


@pytest.mark.promise("C1")
def test_a_truncated_file(tmp_path):
    config = plain(tmp_path)
    os.truncate(tmp_path / "d.h5", 30_000)
    refused(train(2, config), 65, "E_DATA", "d.h5")


@pytest.mark.promise("C5")
def test_a_file_without_the_dataset(tmp_path):
    refused(train(2, plain(tmp_path), "data.y=labels"), 65, "E_DATA", "d.h5", "labels")


@pytest.mark.promise("C6")
def test_a_label_out_of_range_names_row_and_value(tmp_path):
    refused(train(2, plain(tmp_path, values={("y", 77): 10})), 65, "E_DATA", "row=77", "label 10 is outside 0..9", 'dataset="/y"')


@pytest.mark.promise("C6")
def test_nan_in_the_data_names_the_row(tmp_path):
    refused(train(2, plain(tmp_path, values={("x", 33): np.nan}), "data.transform=[]"), 65,
            "E_DATA", "row=33", 'dataset="/x"', "nan")


@pytest.mark.promise("C5")
def test_a_model_of_another_size_than_the_data(tmp_path):
    refused(train(2, plain(tmp_path), "model.inputs=63"), 65, "E_SHAPE", "(64,)", "63")


def test_a_regression_target_for_a_classifier(tmp_path):
    refused(train(2, plain(tmp_path), "train.loss=mse"), 65, "E_SHAPE", "(10,)")


@pytest.mark.promise("D1")
def test_a_loss_that_is_not_finite_names_step_and_layer_and_keeps_the_checkpoint(tmp_path):
    (tmp_path / "net.py").write_text("""
from mpitrain import nn, ops
class Log(nn.Module):
    def forward(self, x): return ops.log(x)
def net():
    return nn.Sequential(("flatten", nn.Flatten()), ("first", nn.Linear(64, 10)), ("bad", Log()))
""")
    text = SMALL.replace('name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10', 'name = "net.py:net"')
    result = refused(train(2, write(tmp_path, text)), 79, "E_NAN", "step=1", '"bad" (Log)')
    assert "RuntimeWarning" not in result.err


@pytest.mark.promise("D1")
def test_a_diverging_run_ends_with_79_and_its_last_checkpoint_is_whole(tmp_path):
    config = plain(tmp_path)
    (tmp_path / "net.py").write_text("""
from mpitrain import nn, ops
class Square(nn.Module):
    def forward(self, x): return ops.multiply(x, x)
def net():
    return nn.Sequential(("a", nn.Linear(64, 64)), ("s", Square()), ("t", Square()), ("u", Square()), ("b", nn.Linear(64, 10)))
""")
    text = config.read_text().replace('name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10', 'name = "net.py:net"')
    refused(train(2, write(tmp_path, text), "run.out=a", "optimizer.name=sgd", "optimizer.lr=1e4", "optimizer.clip_norm=0",
                  "checkpoint.every=1", "optimizer.schedule=constant"), 79, "E_NAN", "step=")
    found = folders.candidates(tmp_path / "a/checkpoints")
    for path in found:
        load(path).verify()


@pytest.mark.promise("B10")
def test_a_checkpoint_of_another_model(tmp_path):
    config = write(tmp_path)
    assert train(1, config, "run.out=a", "train.steps=8").rc == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "a/checkpoints").rglob("*")}
    refused(train(2, config, "run.out=a", "--resume", "model.hidden=[33]"), 65, "E_CHECKPOINT", "reshaped", "33")
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "a/checkpoints").rglob("*")}


@pytest.mark.slow
def test_evaluate_and_init_from_speak_of_what_was_asked_for(tmp_path):
    config = write(tmp_path)
    assert train(1, config, "run.out=a", "train.steps=8", "checkpoint.every=4").rc == 0
    for step, words in ((8, ("evaluating step-00000004", "model.init_from: starting from step-00000004")), (4, ())):
        part = tmp_path / f"a/checkpoints/step-{step:08d}/part-00000.h5"
        part.write_bytes(part.read_bytes()[:-1])
        evaluated = mpirun(1, "-m", "mpitrain", "evaluate", tmp_path / "a", cwd=tmp_path)
        started = train(1, config, "run.out=b", "--overwrite", "model.init_from=a", "train.steps=2")
        for result, word in zip((evaluated, started), words or ("none of the checkpoints is whole",) * 2):
            assert result.rc == (0 if words else 65) and word in result.err and "resum" not in result.err, result.err
    folders.remove_all(tmp_path / "a/checkpoints")
    refused(mpirun(1, "-m", "mpitrain", "evaluate", tmp_path / "a", cwd=tmp_path), 66, "there is no checkpoint to evaluate")
    refused(train(1, config, "run.out=b", "--overwrite", "model.init_from=a"), 66, "model.init_from names neither")


@pytest.mark.promise("B12")
def test_an_existing_run_folder_is_left_alone(tmp_path):
    config = write(tmp_path)
    assert train(1, config, "run.out=a", "train.steps=8").rc == 0
    before = (tmp_path / "a/metrics.jsonl").read_bytes()
    refused(train(2, config, "run.out=a"), 73, "E_OUTPUT", "--resume", "--overwrite")
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == before
    refused(train(2, config, "run.out=a", "--resume", "--overwrite"), 64, "E_USAGE", "one of them")


def test_nothing_to_resume(tmp_path):
    refused(train(2, write(tmp_path), "run.out=none", "--resume"), 73, "E_OUTPUT", "no run to resume")
    assert not (tmp_path / "none").exists()


@pytest.mark.promise("B12")
def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    refused(train(2, write(tmp_path), "run.out=file/run"), 73, "file/run")


@pytest.mark.promise("A1")
def test_an_exception_on_one_rank_ends_the_job_in_seconds_with_the_traceback_on_file(tmp_path):
    (tmp_path / "net.py").write_text("""
from mpitrain import nn
from mpitrain.comm.job.start import started
class Faulty(nn.Module):
    calls = 0
    def forward(self, x):
        Faulty.calls += 1
        if started().rank == 1 and Faulty.calls == 9:
            raise ZeroDivisionError("on purpose")
        return x
def net():
    return nn.Sequential(("flatten", nn.Flatten()), ("f", Faulty()), ("first", nn.Linear(64, 10)))
""")
    text = SMALL.replace('name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10', 'name = "net.py:net"')
    result = refused(runs.train(3, write(tmp_path, text), "run.out=a"), 70, "E_USER", "rank=1/3",
                     "ZeroDivisionError at net.py:9 in forward: on purpose")
    assert (tmp_path / "a/errors/rank-1.json").is_file() and result.orphans == ()


@pytest.mark.promise("E4")
def test_a_job_that_is_suspended_goes_on_when_it_is_continued(tmp_path):
    config = write(tmp_path)
    train(2, config, "run.out=b")
    job = start(2, config, "run.out=a")
    job.wait_for("step 10/")
    everyone = [*job.ranks(), job.process.pid]
    for number, state in ((signal.SIGSTOP, "stopped"), (signal.SIGCONT, "running")):
        for pid in everyone:
            os.kill(pid, number)
        while state == "stopped" and not all(Process(pid).status() == "stopped" for pid in everyone):
            pass
    assert job.finish(60).rc == 0
    assert record(tmp_path / "a")["parameters_sha256"] == record(tmp_path / "b")["parameters_sha256"]


@pytest.mark.promise("A12")
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-", ""])
def test_streams_that_are_closed_before_the_start_change_no_exit_code(tmp_path, n, closed):
    (tmp_path / "net.py").write_text("def net():\n    raise ZeroDivisionError('on purpose')\n")
    text = SMALL.replace('name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10', 'name = "net.py:net"')
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "mpitrain", "train", str(write(tmp_path, text))]
    with_ranks = [find_mpirun(), "-n", "2", *command] if n == 2 else command
    result = Job(with_ranks, clean_environment(), tmp_path).finish(60)
    assert result.rc == 78 and result.seconds < 30
    assert len(result.error_lines) == (not closed), result.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.promise("E2", "E3")
def test_ctrl_c_ends_the_job_within_five_seconds_and_leaves_metrics_and_checkpoint_whole(tmp_path, number):
    import time
    job = start(2, write(tmp_path), "run.out=a", "train.steps=100000", "checkpoint.every=10", "train.eval_every=0")
    job.wait_for("step 30/")
    before = time.monotonic()
    job.signal(number)
    result = job.finish(timeout=20)
    assert time.monotonic() - before < 5 and result.rc != 0 and result.orphans == ()
    assert lines(tmp_path / "a")[-1]["step"] >= 30                   # every line parses
    store.latest(tmp_path / "a/checkpoints")


@pytest.mark.slow
@pytest.mark.promise("B11")
def test_two_jobs_in_one_folder_the_second_is_told_who_holds_it(tmp_path):
    config = write(tmp_path)
    job = start(1, config, "run.out=a", "train.steps=100000")
    job.wait_for("step 5/")
    refused(train(1, config, "run.out=a", "--resume"), 73, "E_OUTPUT", "busy", "pid=")
    refused(train(1, config, "run.out=a", "--overwrite"), 73, "E_OUTPUT", "busy")
    job.signal(signal.SIGTERM)
    job.finish(timeout=20)


@pytest.mark.promise("A7")
def test_ranks_with_different_configurations_are_refused(tmp_path):
    a, b = write(tmp_path), write(tmp_path, SMALL.replace("lr = 3e-3", "lr = 4e-3"), "other.toml")
    each = [sys.executable, "-m", "mpitrain", "train"]
    command = [find_mpirun(), "-n", "1", *each, str(a), "run.name=x", ":", "-n", "1", *each, str(b), "run.name=x"]
    refused(Job(command, clean_environment(), tmp_path).finish(60), 76, "E_MISMATCH",
            "optimizer.lr is 0.003 on rank 0 and 0.004 on rank 1")


@pytest.mark.promise("D1")
def test_parameters_that_are_not_finite_are_never_saved_over_the_last_good_checkpoint(tmp_path):
    (tmp_path / "rate.py").write_text("""
def boom(*, lr, min_lr, warmup_steps, total_steps):
    return lambda step: 1e39 if step == 13 else lr
""")
    config = write(tmp_path)
    refused(train(1, config, "run.out=a", "optimizer.name=sgd", "optimizer.schedule=rate.py:boom", "optimizer.clip_norm=0",
                  "checkpoint.every=7", "checkpoint.keep=1", "optimizer.warmup_steps=0"), 79, "E_NAN", "step=14", "not finite")
    assert store.latest(tmp_path / "a/checkpoints").step == 7


def test_a_finished_run_that_is_resumed_keeps_its_result(tmp_path):
    config = write(tmp_path)
    for flags in ((), ("--resume",)):
        assert train(1, config, "run.out=a", "train.steps=25", *flags).rc == 0
        metrics = record(tmp_path / "a")["metrics"]
        assert metrics["accuracy"] > 0.1 and record(tmp_path / "a")["status"] == "done"


def test_one_number_a_row_is_a_target_too(tmp_path):
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["x"] = rng.standard_normal((200, 64))
        file["y"] = rng.standard_normal(200)
    text = SMALL.replace('path = "digits"', 'path = "d.h5"\nx = "x"\ny = "y"').replace("outputs = 10", "outputs = 1")
    assert train(2, write(tmp_path, text), "train.loss=mse", "train.steps=8").rc == 0


@pytest.mark.parametrize(("override", "status"), [("model.init_from=nope", 66), ("log.tensorboard=true", 78),
                                                  ("model.hiden=[3]", 78)])
@pytest.mark.promise("B12")
def test_overwrite_deletes_nothing_before_the_new_run_can_start(tmp_path, override, status):
    config = write(tmp_path)
    assert train(1, config, "run.out=a", "train.steps=8").rc == 0
    hidden = tmp_path / "tensorboardX.py"                                # as if the package were not there
    hidden.write_text("raise ImportError('not installed')")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    refused(train(1, config, "run.out=a", "--overwrite", override, env=path), status, "E_")
    assert store.latest(tmp_path / "a/checkpoints").step == 8


def test_a_run_may_start_from_itself_with_overwrite(tmp_path):
    config = write(tmp_path)
    assert train(1, config, "run.out=a", "train.steps=50").rc == 0
    first = record(tmp_path / "a")["metrics"]["loss"]
    assert train(2, config, "run.out=a", "--overwrite", "model.init_from=a", "train.steps=8").rc == 0
    assert record(tmp_path / "a")["metrics"]["loss"] < first + 0.5
