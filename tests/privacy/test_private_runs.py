"""Whole private runs: their gradients against a computation of their own, bits on any ranks, what they claim, what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import ROOT
from private_configs import CLIENTS, ROWS
from runs import lines, many, record, steps, train, write

from mpitrain.checkpoint import store
from mpitrain.data.poisson import PoissonSampler
from mpitrain.privacy.accountant import RenyiAccountant
from mpitrain.train import open_data

pytestmark = pytest.mark.alone

LAYOUT = "train.reproducible=layout", "train.steps=3", "privacy.noise=seeded:0.5"
BY_ROW = "privacy.by_row=true"
HIDDEN = "privacy.noise=0.5"
SHARED = """
from mpitrain import nn


def chain(inputs, hidden, outputs):
    middle = nn.Linear(8, 8, bias=False)
    return nn.Sequential(nn.Flatten(), ("first", nn.Linear(inputs, 8, bias=False)), ("middle", middle), ("again", middle),
                         ("head", nn.Linear(8, outputs, bias=False)))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder of runs, made by one start of mpirun, and what each has told, by the name of its folder."""
    folder = tmp_path_factory.mktemp("private")
    write(folder, ROWS, "rows.toml")
    write(folder, CLIENTS, "clients.toml")
    (folder / "shared.py").write_text(SHARED)
    chain = "model.name=shared.py:chain"
    asked: list[tuple[Any, ...]] = [
        (1, "rows.toml", "optimizer.lr=0.0", "run.out=start"),
        (1, "rows.toml", "run.out=clipped"), (1, "rows.toml", "privacy.clip=100.0", "run.out=whole"),
        (2, "rows.toml", BY_ROW, "run.out=by_row"),
        (1, "rows.toml", chain, "optimizer.lr=0.0", "run.out=start_shared"), (2, "rows.toml", chain, "run.out=shared"),
        *((n, "rows.toml", *LAYOUT, "train.micro_batches=4", f"run.out=rows{n}") for n in (1, 3)),
        *((n, "rows.toml", *LAYOUT, BY_ROW, f"run.out=each{n}") for n in (1, 3)),
        (1, "rows.toml", HIDDEN, "train.steps=6", "checkpoint.every=2", "run.out=hidden"),
        (2, "rows.toml", HIDDEN, "train.steps=6", "run.out=again"),
        (1, "rows.toml", "privacy.sampling=shuffle", HIDDEN, "run.out=shuffled"),
        *((n, "clients.toml", "train.steps=2", f"run.out=clients{n}") for n in (1, 3)),
        *((n, "clients.toml", "train.steps=2", "privacy.secure=true", f"run.out=secure{n}") for n in (1, 3)),
        (2, "clients.toml", "train.steps=3", "privacy.secure=true", "workers.drop=0.3", HIDDEN, "run.out=dropped"),
        (1, "clients.toml", "workers.each_round=8", HIDDEN, "run.out=fixed"),
        (1, "clients.toml", "privacy.noise=0.0", "privacy.epsilon=20.0", "run.out=wanted")]
    told = many(folder, *asked, timeout=150)
    return folder, {words[-1].partition("=")[2]: one for (_, *words), one in zip(asked, told, strict=True)}


def parameters(run: Path, *names: str) -> dict[str, np.ndarray]:
    found = store.latest(run / "checkpoints")
    return {name: found.read(f"parameters/{name}").astype(np.float64) for name in names or ("head.weight", "head.bias")}


def first_batch() -> tuple[np.ndarray, np.ndarray]:
    """The rows of the first step, (n, 64) and (n,)."""
    inputs = open_data("digits", transform=["scale"], validation="tail:0.2")
    inputs.transforms.fit(inputs.training, inputs.train_rows)
    rows = PoissonSampler(inputs.train_rows, 16 / 1437, seed=0).rows(0)
    assert 5 < len(rows) < 40 and len(rows) != 16
    x, y = inputs.training.read(rows)
    return inputs.transforms(x).reshape(len(rows), 64).astype(np.float64), y


def error_of(logits: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of the loss by each row's outputs."""
    p = np.exp(logits - logits.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) - np.eye(10)[y]


@pytest.mark.parametrize("run, clip", [("clipped", 1.0), ("by_row", 1.0), ("whole", 100.0)])
def test_a_step_is_the_sum_of_clipped_gradients_over_the_expected_number(found: Any, run: str, clip: float) -> None:
    folder, _ = found
    before, after = parameters(folder / "start"), parameters(folder / run)
    x, y = first_batch()
    error = error_of(x @ before["head.weight"].T + before["head.bias"], y)
    norms = np.sqrt((error ** 2).sum(1) * ((x ** 2).sum(1) + 1))          # of the outer product, and of the bias
    scaled = error * np.minimum(1, clip / norms)[:, None]
    assert (norms > 1).any() and not (norms > 100).any()
    for name, total in (("head.weight", scaled.T @ x), ("head.bias", scaled.sum(0))):
        assert np.allclose(after[name], before[name] - 0.5 * total / 16, rtol=0, atol=4e-6)


def test_a_layer_that_is_used_twice_has_each_rows_gradient_of_both_uses_clipped(found: Any) -> None:
    """Its rows are micro-batches of their own: no rule of norms knows a sum of two uses."""
    folder, _ = found
    names = "first.weight", "middle.weight", "head.weight"
    before, after = (parameters(folder / run, *names) for run in ("start_shared", "shared"))
    x, y = first_batch()
    first, middle, head = before.values()
    h = [x @ first.T]
    h += [h[0] @ middle.T, h[0] @ middle.T @ middle.T]
    g = [error_of(h[2] @ head.T, y)]
    g += [g[0] @ head, g[0] @ head @ middle, g[0] @ head @ middle @ middle]
    each = [np.einsum("no,ni->noi", a, b) for a, b in ((g[3], x), (g[2], h[0]), (g[1], h[1]), (g[0], h[2]))]
    each = [each[0], each[1] + each[2], each[3]]
    norms = np.sqrt(sum((one ** 2).sum((1, 2)) for one in each))
    assert (norms > 1).any()
    for name, one in zip(names, each):
        total = (one * np.minimum(1, 1 / norms)[:, None, None]).sum(0)
        assert np.allclose(after[name], before[name] - 0.5 * total / 16, rtol=0, atol=4e-6), name


def test_bits_of_private_rows_and_clients_do_not_depend_on_ranks(found: Any) -> None:
    _, told = found
    for runs in (("rows1", "rows3"), ("each1", "each3"), ("clients1", "clients3"), ("secure1", "secure3")):
        assert len({told[run]["parameters_sha256"] for run in runs}) == 1, runs


def test_a_secure_sum_is_the_sum_but_for_its_rounding(found: Any) -> None:
    folder, _ = found
    plain, secure = (store.latest(folder / run / "checkpoints") for run in ("clients1", "secure1"))
    apart = [np.abs(plain.read(name) - secure.read(name)).max() for name in plain.arrays if name.startswith("parameters/")]
    assert 0 < max(apart) < 1e-6


def test_two_runs_draw_other_noise_and_other_rows(found: Any) -> None:
    folder, told = found
    assert told["hidden"]["parameters_sha256"] != told["again"]["parameters_sha256"]
    assert [line["loss"] for line in steps(folder / "hidden")] != [line["loss"] for line in steps(folder / "again")]


def test_epsilon_is_in_each_line_only_grows_and_is_that_of_the_accountant(found: Any) -> None:
    folder, _ = found
    for run, q, sigma, n, delta in (("hidden", 16 / 1437, 0.5, 6, 1e-5), ("dropped", 0.4, 0.5, 3, 1e-3)):
        told = steps(folder / run)
        values = [line["epsilon"] for line in told]
        assert values == sorted(values) and len(set(values)) == n and {line["delta"] for line in told} == {delta}
        assert values[-1] == RenyiAccountant().epsilon({(q, sigma): n}, delta)
        kept = store.latest(folder / run / "checkpoints").meta["privacy"]
        assert kept["history"] == [[q, sigma, n]] == json.loads((folder / run / "privacy.json").read_text())["history"]
        assert record(folder / run)["privacy"] == kept


def test_noise_is_found_for_the_epsilon_that_is_wanted(found: Any) -> None:
    folder, _ = found
    last = steps(folder / "wanted")[-1]
    assert 19.99 < last["epsilon"] <= 20.0


@pytest.mark.parametrize("run", ["shuffled", "fixed", "clients1", "rows1"])
def test_no_epsilon_is_told_where_none_holds(found: Any, run: str) -> None:
    folder, _ = found
    assert all("epsilon" not in line for line in lines(folder / run)) and not (folder / run / "privacy.json").exists()
    assert store.latest(folder / run / "checkpoints").meta["privacy"]["history"] is None


def test_clients_that_do_not_answer_are_left_out_of_a_secure_round(found: Any) -> None:
    folder, told = found
    assert told["dropped"]["steps"] == 3 and sum(line["dropped"] for line in steps(folder / "dropped")) > 0
    assert all("drift" not in line for line in steps(folder / "dropped"))


def test_a_run_goes_on_with_what_it_has_spent_and_not_with_another_claim(found: Any) -> None:
    """A run of 6 steps with checkpoints at 2, 4 and 6, whose last is lost: steps 5 and 6 were in its metrics, and count."""
    folder, _ = found
    run = folder / "hidden"
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    keys = ("rows.toml", HIDDEN, "checkpoint.every=2", "run.out=hidden", "--resume")
    wrong = [("privacy.delta=1e-6", "the run's privacy.delta was 1e-05, and is 1e-06 now"), ("privacy.clip=2.0", "privacy.clip"),
             ("data.validation=tail:0.3", "data.validation"),
             ("privacy.noise=seeded:0.5", "steps that no epsilon holds for, and others, do not add up")]
    longer = "clients.toml", "privacy.noise=0.0", "privacy.epsilon=20.0", "run.out=wanted", "train.steps=8", "--resume"
    wrong.append(("", "privacy.epsilon = 20 leaves too little for the 4 steps to come, with 20 spent"))
    told = many(folder, *((1, *keys, "train.steps=8", key) for key, _ in wrong[:-1]), (1, *longer), (1, *keys, "train.steps=8"),
                timeout=90)
    for (_, said), one in zip(wrong, told):
        assert one["status"] in (65, 78) and said in one["message"], one
    assert told[-1]["steps"] == 8
    assert store.latest(run / "checkpoints").meta["privacy"]["history"] == [[16 / 1437, 0.5, 6 + 4]]
    values = [line["epsilon"] for line in steps(run)]
    assert values == sorted(values) and values[-1] == RenyiAccountant().epsilon({(16 / 1437, 0.5): 10}, 1e-5)


def test_no_key_is_in_any_file(tmp_path: Path) -> None:
    """All random bytes that a secure run has drawn, looked for in all that it has written."""
    write(tmp_path, CLIENTS, "clients.toml")
    program = """
import json, os, secrets, sys
drawn, urandom, bits = [], os.urandom, secrets.randbits
def noted(n):
    drawn.append(urandom(n))
    return drawn[-1]
def noted_bits(n):
    found = bits(n)
    drawn.append(str(found).encode())
    return found
os.urandom, secrets.randbits = noted, noted_bits
from mpitrain.cli import main
try:
    code = main(["train", "clients.toml", "privacy.secure=true", "privacy.noise=0.5", "train.steps=2"])
finally:
    written = b"".join(open(os.path.join(at, name), "rb").read() for at, _, names in os.walk("runs") for name in names)
    forms = [form for one in drawn for form in (one, one.hex().encode(), str(int.from_bytes(one, "little")).encode(),
                                                one[::-1].hex().encode()) if len(one) >= 16]
    print(json.dumps([len(drawn), len(written), sum(form in written for form in forms)]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    drawn, written, kept = json.loads(done.stdout.splitlines()[-1])
    assert drawn > 10 and written > 10_000 and kept == 0, done.stdout + done.stderr


def test_a_run_that_hides_nothing_reads_none_of_it(tmp_path: Path) -> None:
    write(tmp_path, ROWS.replace('privacy = {unit = "sample", noise = "seeded:1e-8"}', ""))
    program = ("import sys; from mpitrain.cli import main; main(['inspect', 'run.toml']); print([name for name in sys.modules if "
               "name.startswith('mpitrain.privacy') or name.endswith(('ledger', 'poisson', 'build.privacy'))])")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


KILLS = """
import os, signal
from mpitrain.privacy.secure_round import SecureRound
from mpitrain.train import Observer
class Dies(Observer):
    def begin(self, run):
        whole, rounds = SecureRound._open, []
        def half(self, came, there):
            rounds.append(1)
            if run.rank == 1 and len(rounds) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(self, came, there)
        SecureRound._open = half
"""


@pytest.mark.slow
def test_a_rank_that_dies_while_shares_are_collected_ends_the_run_and_it_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    config = write(tmp_path, CLIENTS.replace("count = 20", "count = 10"), "clients.toml")
    (tmp_path / "own.py").write_text(KILLS)
    keys = "privacy.secure=true", "privacy.delta=1e-2", "checkpoint.every=2"
    died = train(2, config, *keys, "run.out=died", "log.observers=own.py:Dies")
    assert died.rc == 137 and len(died.error_lines) == 1 and "E_PEER" in died.error_lines[0], died.out + died.err
    whole, resumed = many(tmp_path, (2, "clients.toml", *keys, "run.out=whole"),
                          (1, "clients.toml", *keys, "run.out=died", "--resume"))
    assert whole["parameters_sha256"] == resumed["parameters_sha256"] and resumed["steps"] == 4
