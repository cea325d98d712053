"""`mpitrain bench train`: what it writes, that its steps are training, and that it believes no step that taught nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from launch import Result
from standing import mpirun

from mpitrain.backend import memory, native
from mpitrain.backend.memory import page_faults, resident
from mpitrain.bench import peak
from mpitrain.bench.pairs import WARM_UP, in_turn
from mpitrain.bench.workloads import WORKLOADS, Workload

FIELDS = ["bench", "model", "precision", "ranks", "threads", "seconds", "flops", "peak_fraction", "page_faults", "peak_rss_mb"]

TINY = """
import sys
import numpy as np
from mpitrain import models
from mpitrain.bench import train
from mpitrain.bench.workloads import WORKLOADS, Workload, transformer
from mpitrain.cli import main
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import start
WORKLOADS.register("tiny")(Workload(lambda: models.mlp(6, [8], 3), 5, (6,), 3, 1000))
WORKLOADS.register("tiny-gpt")(transformer(1, 2, 8, 4, 7, batch=3))
"""
RUN = "Process().run(lambda: main(['bench', 'train', *sys.argv[1:]]))\n"


def bench(n: int, folder: Path, *arguments: str, before: str = "") -> Result:
    program = folder / "program.py"
    program.write_text(TINY + before + RUN)
    return mpirun(n, program, *arguments, cwd=folder, env={"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("n", [1, 2])
def test_each_model_and_precision_is_one_object(n: int, tmp_path: Path) -> None:
    result = bench(n, tmp_path, "--models", "tiny,tiny-gpt", "--precision", "float32,float64", "--steps", "3", "--json", "r.json")
    assert result.rc == 0 and result.error_lines == [], result.err
    records = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    assert [(r["model"], r["precision"]) for r in records] == [
        (model, precision) for model in ("tiny", "tiny-gpt") for precision in ("float32", "float64")]
    for r in records:
        assert list(r)[:len(FIELDS)] == FIELDS
        assert (r["bench"], r["ranks"], r["threads"], r["steps"]) == ("train", n, 1, 3)
        assert 0 < r["seconds_low"] <= r["seconds"] <= r["seconds_high"] and r["page_faults"] >= 0
        assert r["peak_fraction"] == pytest.approx(r["flops"] / r["seconds"] / r["peak_flops"])
        assert r["peak_rss_mb"] > 10 and r["last_loss"] < r["first_loss"] and "versions" in r["machine"]
    assert [r["flops"] for r in records[::2]] == [5 * 1000, 3 * (6 * (12 * 64 + 7 * 8) * 4 + 12 * 4 * 8 * 4)]
    assert records[0]["parameters"] == 6 * 8 + 8 + 8 * 3 + 3
    assert records[0]["first_loss"] == pytest.approx(records[1]["first_loss"], rel=1e-5), "the same values in both precisions"
    table = result.out.splitlines()
    assert len(table) == 2 + len(records) and table[2].startswith("tiny      float32 ")


def test_every_model_that_the_help_names_is_there() -> None:
    assert list(WORKLOADS) == ["mlp", "lenet", "resnet20", "gpt-nano", "gpt-baby", "gpt2"]


# Parameters as the models' authors count them, and the batches that the figures are for.
@pytest.mark.parametrize(("name", "parameters", "batch"), [
    ("mlp", 784 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10, 128), ("lenet", 61706, 128), ("resnet20", 269722, 128),
    ("gpt-nano", 65 * 128 + 64 * 128 + 4 * (12 * 128 ** 2 + 2 * 128) + 128, 12),
    ("gpt-baby", 65 * 384 + 256 * 384 + 6 * (12 * 384 ** 2 + 2 * 384) + 384, 8), ("gpt2", 124439808, 4)])
def test_the_models_are_the_well_known_ones(name: str, parameters: int, batch: int) -> None:
    workload = WORKLOADS[name]
    assert workload.make().count_parameters() == parameters and workload.batch == batch
    x, y = workload.samples(3, seed=0)
    assert x.shape == (3, *workload.shape) and y.shape == (x.shape if workload.tokens else (3,))
    assert 0 <= y.min() <= y.max() < workload.classes and workload.flops == batch * workload.flops_a_sample


def test_the_flops_of_the_two_nets_with_published_counts() -> None:
    """ResNet-20: 40.55 million multiply-adds forward at 32 x 32 (without shortcuts); the MLP by hand."""
    first = 27 * 16 * 32 * 32
    assert (WORKLOADS["resnet20"].flops_a_sample + 2 * first) / 6 == pytest.approx(40.55e6, rel=1e-3)
    assert WORKLOADS["mlp"].flops_a_sample == 4 * 784 * 1024 + 6 * 1024 * 1024 + 6 * 1024 * 10


CHECKED = """
world = start()
training = train.Training(WORKLOADS["tiny"], world.comm)
training.run(6)
training.check("tiny")
assert len(training.losses) == 6 and training.losses[4] < training.losses[0]
x, y = training.batches[0]
assert x.shape == (5, 6) and len(training.batches) == train.BATCHES
everyone = training.job.channel.gather_objects(x.tolist())
assert everyone[0] != everyone[-1] or world.size == 1, "each rank has rows of its own"
{wrong}
"""


@pytest.mark.parametrize(("n", "wrong", "rc", "message"), [
    (1, "training.losses[3] = float('nan')", 79, "E_NAN rank=0/1 .* step=4: bench train tiny: the loss is nan; its times"),
    (1, "training.losses.extend([9.0, 9.0])", 70, "the loss on the same batches was .* at first and is 9 after 8 steps, where"),
    (2, "training.losses[-1] += world.rank", 76, "ranks disagree about the losses of tiny: rank 0 has"),
    (2, "next(training.model.named_parameters())[1].array[0] += world.rank", 76, "ranks disagree about the parameters of tiny")])
def test_steps_that_must_not_be_timed_are_refused(n: int, wrong: str, rc: int, message: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    body = "".join(f"    {line}\n" for line in CHECKED.format(wrong=wrong).splitlines())
    program.write_text(f"{TINY}\ndef run():\n{body}    training.check('tiny')\nProcess().run(run)\n")
    result = mpirun(n, program, cwd=tmp_path)
    assert result.rc == rc and len(result.error_lines) == 1, result.out + result.err
    assert re.search(message, result.error_lines[0]), result.error_lines


def test_a_model_whose_gradients_are_wrong_ends_the_job_with_one_line(tmp_path: Path) -> None:
    """Turned round, they lead uphill."""
    uphill = """
from mpitrain.parallel.pipeline.runner import Pipeline
was = Pipeline.run
def run(self, *arguments, **options):
    found = was(self, *arguments, **options)
    self.reducer.gradients[...] *= -1
    return found
Pipeline.run = run
"""
    result = bench(1, tmp_path, "--models", "tiny", "--steps", "1", before=uphill)
    assert result.rc == 70 and len(result.error_lines) == 1, result.out + result.err
    assert "where it should have fallen; its times must not be used" in result.error_lines[0]


@pytest.mark.parametrize(("arguments", "rc", "message"), [
    (["--models", "gptnano"], 64, '--models knows no "gptnano" (did you mean "gpt-nano"?); choose from mlp, lenet'),
    (["--steps", "0"], 64, "--steps must be at least 1, found 0"),
    (["--models", "tiny", "--precision", "float33"], 78, '"float33" (did you mean "float32"?)')])
def test_a_mistake_is_one_line(arguments: list[str], rc: int, message: str, tmp_path: Path) -> None:
    result = bench(2, tmp_path, *arguments)
    assert result.rc == rc and len(result.error_lines) == 1 and message in result.error_lines[0], result.err
    assert "training steps" not in result.out, "no head of a table that stays empty"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_peak_is_of_multiply_adds_that_are_done(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve chains x <- 3/4 x + 1/4 all end at 1; a loop that the compiler had dropped would leave 0 + 1 + ... + 11."""
    run = peak.multiply_adds(dtype)
    if run is None:
        pytest.skip(f"no C compiler: {native.missing()}")
    lanes = run(1) // (2 * 12 * 1000)
    assert lanes in (2, 4, 8, 16) and run(7) == 7 * run(1)
    values = np.zeros(16, dtype)
    library = native.load("peak")
    getattr(library, f"peak_{dtype}")(values.ctypes.data, 1000)
    assert values[:lanes].tolist() == [12.0] * lanes and not values[lanes:].any()
    monkeypatch.setattr(peak, "AT_ONCE", 1e-5)
    assert peak.peak_flops(dtype) > 1e6


def test_without_a_compiler_the_peak_is_a_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda name: None)
    monkeypatch.setattr(peak, "SIDE", 16)
    monkeypatch.setattr(peak, "AT_ONCE", 1e-5)
    assert peak.multiply_adds("float32") is None
    assert peak.matrix_product("float32")(3) == 3 * 2 * 16 ** 3 and peak.peak_flops() > 1e6


def mb(peak: bool = False) -> float:
    return resident(peak) / 2**20


def test_the_peak_of_memory_is_counted_anew_and_fresh_pages_are_faults() -> None:
    if not memory.forget_peak():
        pytest.skip("the peak cannot be reset here: /proc/self/clear_refs is not writable")
    pages = 16384                                             # 64 MiB: above what malloc serves from freed memory
    before, faults = mb(peak=True), page_faults()
    held = np.empty(pages * 4096, np.uint8)
    held[::4096] = 1
    assert page_faults() - faults >= pages // 512      # as few as that with huge pages
    assert mb(peak=True) >= before + 60 and mb() >= before + 60
    del held
    assert mb(peak=True) >= before + 60
    assert memory.forget_peak() and mb(peak=True) < before + 40


def test_members_of_a_round_take_turns_and_the_first_rounds_do_not_count() -> None:
    order: list[tuple[str, int]] = []

    def member(name: str) -> Callable[[int], float]:
        def run(turn: int) -> float:
            order.append((name, turn))
            return float(turn)
        return run
    times = in_turn([member(name) for name in "abc"], 2)
    assert order == [("abc"[turn % 3], turn) for turn in range(3 * (WARM_UP + 2))]
    assert times == [[float(3 * (WARM_UP + i) + which) for i in range(2)] for which in range(3)]


def test_made_up_samples_are_the_same_again() -> None:
    workload: Workload = WORKLOADS["lenet"]
    (x, y), (again, labels), (other, _) = (workload.samples(2, seed) for seed in (1, 1, 2))
    assert x.tobytes() == again.tobytes() != other.tobytes() and y.tolist() == labels.tolist() and x.dtype == np.float32
