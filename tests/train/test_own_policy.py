"""A user's own policy of keeping parameters: the one of docs/extending.md, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch import ROOT, Result
from runs import SMALL, mpirun, record, steps, write
from standing import train

SGD = ("optimizer.name=sgd", "optimizer.momentum=0", "optimizer.clip_norm=0", "log.every=1")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A small run, beside the policy that the document has."""
    blocks = re.findall(r"```python\n(# mine.py\n.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)
    source, = (block for block in blocks if "class LocalSteps" in block)
    (tmp_path / "mine.py").write_text(source)
    (tmp_path / "each.py").write_text(source.replace("EVERY = 3", "EVERY = 1"))
    return write(tmp_path, SMALL)


def ok(result: Result) -> Result:
    assert result.rc == 0 and result.error_lines == [], result.out + result.err
    return result


def test_averaging_parameters_after_each_step_of_plain_descent_is_averaging_gradients(config: Path) -> None:
    folder = config.parent
    ok(train(2, config, "run.out=a", "train.steps=9", *SGD))
    ok(train(2, config, "run.out=b", "train.steps=9", "comm.sharding=each.py:LocalSteps", *SGD))
    ok(train(2, config, "run.out=c", "train.steps=9", "comm.sharding=mine.py:LocalSteps", *SGD))
    plain, each, local = ([line["loss"] for line in steps(folder / name)] for name in "abc")
    assert each == pytest.approx(plain, rel=1e-5) and len(plain) == 9
    assert local[0] == plain[0] and local[2] != pytest.approx(plain[2], rel=1e-5)        # ranks have gone ways of their own
    assert record(folder / "c")["choices"]["exchange"]["way"] == "parameters, averaged every 3 steps"


def test_one_rank_has_the_policy_too(config: Path) -> None:
    (config.parent / "said.py").write_text("from mpitrain.parallel.policies.replicated import Replicated\n\n"
                                           "class Said(Replicated):\n"
                                           "    notes = property(lambda self: ['this policy is mine'], lambda self, new: None)\n")
    assert "this policy is mine" in ok(train(1, config, "run.out=a", "train.steps=3", "comm.sharding=said.py:Said")).out


def test_its_rule_is_asked_by_train_and_inspect(config: Path) -> None:
    line = "ranks have equal parameters after every 3 steps; set train.steps to a multiple of that"
    words = ("run.out=a", "train.steps=7", "comm.sharding=mine.py:LocalSteps")
    for result in (train(2, config, *words), mpirun(1, "-m", "mpitrain", "inspect", config, "--ranks", "2", *words)):
        assert result.rc == 78 and len(result.error_lines) == 1 and line in result.error_lines[0], result.out + result.err


@pytest.mark.parametrize(("words", "message"), [
    (("comm.sharding=mine.py:OwnGradients",), "must be a subclass of mpitrain.parallel.policies.policy.Policy, found mine.py:"),
    (("comm.sharding=mine.py:Nothing",), 'policy "mine.py:Nothing": mine.py has no "Nothing"'),
    (("comm.sharding=mine.py:LocalSteps", "comm.node_shared=true", "train.steps=9"),
     'comm.node_shared = true keeps parameters in a way of its own, and comm.sharding = "mine.py:LocalSteps" in another')])
def test_what_is_no_policy_or_cannot_be_one_of_a_node_is_refused(config: Path, words: tuple[str, ...], message: str) -> None:
    result = train(2, config, "run.out=a", *words)
    assert result.rc == 78 and len(result.error_lines) == 1 and message in result.error_lines[0], result.out + result.err


ADDED = """
import sys
from mpitrain.cli import main
from mpitrain.comm.job.guard import Process
from mpitrain.config.sections import POLICIES
from mpitrain.parallel.policies.replicated import Replicated


@POLICIES.register("added")
class Added(Replicated):
    notes = property(lambda self: ["this policy was added"], lambda self, new: None)


Process().run(lambda: main(sys.argv[1:]))
"""


def test_a_policy_needs_one_registration_to_train_and_be_inspected(config: Path) -> None:
    """Rules about states that are cut ask what it cuts: nothing, so each micro-batch's sums and measured buckets are allowed."""
    program = config.parent / "program.py"
    program.write_text(ADDED)
    words = (config, "train.steps=3", "train.micro_batches=4", "comm.sharding=added")
    for free in (("comm.bucket_mb=auto",), ("train.reproducible=layout",)):
        trained = ok(mpirun(2, program, "train", *words, f"run.out={free[0][:9]}", *free, cwd=config.parent))
        assert "this policy was added" in trained.out
        assert 'comm.sharding = "added": a rank' in ok(mpirun(1, program, "inspect", "--ranks", "2", *words, *free)).out
    refused = mpirun(1, program, "inspect", "--ranks", "2", *words, "comm.node_shared=true")
    assert refused.rc == 78 and 'comm.sharding = "added" in another' in refused.error_lines[0]
    assert '(did you mean "added"?)' in mpirun(1, program, "inspect", *words, "comm.sharding=addet").error_lines[0]
