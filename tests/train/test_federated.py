"""Runs of federations: the formulas, the same bits on any ranks, resumed and not, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from federations import DIGITS, Simulated, newest, parameters
from launch import ROOT
from runs import GPT, lines, ok, record, refused, steps, without_times, write, write_tokens
from standing import mpirun, train

SCAFFOLD = ("workers.correct=scaffold",)
ALL = ("workers.each_round=poisson:0.3", "workers.drop=0.2", "workers.correct=scaffold", "train.precision=float32",
       "train.micro_batches=8", "sync.levels=[{over='workers', every='2 epochs', outer='fedadam', lr=0.05}]")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write(tmp_path, DIGITS)


@pytest.mark.parametrize(("words", "options"), [
    ((), {}),
    (("workers.weights=equal", "workers.rows=sizes:1.0", "workers.drop=0.3"), {}),
    (("workers.rows=shards:2", "train.micro_batches=4"), {}),
    (("workers.correct=prox:0.5",), {"mu": 0.5}),
    (SCAFFOLD, {"scaffold": True}),
    (("optimizer.clip_norm=0.3",), {"clip": 0.3}),
    (("sync.levels=[{over='workers', every=5, lr=0.5}]",), {"outer": lambda theta, delta: theta - 0.5 * delta}),
    (("workers.each_round=0", "workers.count=3", "data.workers=0"), {})])
def test_a_federation_is_what_a_few_lines_of_numpy_compute(config: Path, words: tuple[str, ...],
                                                           options: dict[str, object]) -> None:
    ok(train(2, config, *words))
    expected = Simulated(config, *words).run(6, **options)                     # type: ignore[arg-type]
    found = parameters(config.parent / "runs/run")
    assert np.abs(found - expected).max() < 1e-12 and np.abs(expected - Simulated(config, *words).theta).max() > 0.1


def test_one_worker_that_is_always_drawn_trains_as_without_a_federation(config: Path) -> None:
    """To the rounding of start - (start - theta), once a round."""
    words = ("workers.count=1", "workers.each_round=1", "workers.rows=iid")
    ok(train(1, config, *words))
    plain = Simulated(config, *words)
    lr, rows = plain.config.optimizer.lr, plain.rounds.rows_of[0]
    from mpitrain.data.keyed import key
    for round in range(6):
        for _, places in plain.rounds.local.batches(len(rows), key(0, "worker", 0, round)):
            plain.theta -= lr * plain.gradient(plain.theta, rows[places])
    assert np.abs(parameters(config.parent / "runs/run") - plain.theta).max() < 1e-13


def test_control_variates_add_up_to_as_many_times_the_servers(config: Path) -> None:
    ok(train(3, config, *SCAFFOLD))
    run, reference = config.parent / "runs/run", Simulated(config, *SCAFFOLD)
    reference.run(6, scaffold=True)
    workers = {int(name.split("/")[1]) for name in newest(run).arrays if name.startswith("workers/")}
    own = {worker: parameters(run, f"workers/{worker}/control") for worker in workers}
    assert workers == set(reference.controls) and len(workers) > 10
    assert all(np.abs(own[worker] - reference.controls[worker]).max() < 1e-12 for worker in workers)
    assert np.abs(sum(own.values()) - 30 * parameters(run, "outer/control")).max() < 1e-11


def test_the_bits_are_those_of_any_number_of_ranks(config: Path) -> None:
    """Everything at once: a random number of workers, some of which do not answer, with state, on seats of several."""
    folder = config.parent
    for n in (1, 2, 3, 4):
        ok(train(n, config, *ALL, f"run.out=on{n}"))
    runs = [folder / f"on{n}" for n in (1, 2, 3, 4)]
    assert len({record(run)["parameters_sha256"] for run in runs}) == 1
    told = [without_times(lines(run)) for run in runs]
    assert told[0] == told[1] == told[2] == told[3]
    counts = [(line["workers"], line["dropped"], line["wire_bytes"]) for line in steps(runs[0])]
    assert len({workers for workers, _, _ in counts}) > 1 and any(dropped for _, dropped, _ in counts)
    assert all(nbytes == workers * 2 * 650 * 4 for workers, _, nbytes in counts)                # SCAFFOLD sends twice
    ok(train(2, config, *ALL, "run.out=other", "run.seed=1"))
    assert record(folder / "other")["parameters_sha256"] != record(runs[0])["parameters_sha256"]


@pytest.mark.parametrize("done", [1, 4])
def test_a_federation_that_goes_on_on_other_ranks_ends_with_the_undisturbed_bits(config: Path, done: int) -> None:
    folder = config.parent
    ok(train(1, config, *ALL, "run.out=whole"))
    ok(train(3, config, *ALL, "run.out=cut", f"train.steps={done}"))
    shutil.copytree(folder / "cut", folder / "without")
    ok(train(2, config, *ALL, "run.out=cut", "--resume"))
    assert record(folder / "cut")["parameters_sha256"] == record(folder / "whole")["parameters_sha256"]
    assert without_times(lines(folder / "cut"))[-1] == without_times(lines(folder / "whole"))[-1]


def test_a_worker_trains_alike_whoever_else_is_drawn(config: Path) -> None:
    """Of two workers alone, and of all, the same one moves as far: its loss is the round's."""
    folder = config.parent
    (folder / "one.py").write_text("import numpy as np\n\ndef alone(labels, count, worker, seed):\n"
                                   "    half = np.flatnonzero(np.arange(len(labels)) % 2 == worker)\n    return half\n")
    found = []
    for each in (1, 2):
        words = ("workers.count=2", "workers.rows=one.py:alone", f"workers.each_round={each}", "train.steps=8")
        ok(train(1, config, *words, f"run.out=each{each}"))
        found.append(Simulated(config, *words).rounds.draw)
    alone = [int(found[0].drawn(round)[0]) for round in range(8)]
    assert set(alone) == {0, 1}
    first = steps(folder / "each1")[0]["loss"], steps(folder / "each2")[0]["loss"]
    both = Simulated(config, *words)
    one, other = (np.mean([_loss(both, worker, 0)]) for worker in (0, 1))
    sizes = [len(own) for own in both.rounds.rows_of]
    assert first[0] == pytest.approx((one, other)[alone[0]], rel=1e-9)
    assert first[1] == pytest.approx((one * sizes[0] + other * sizes[1]) / sum(sizes), rel=1e-9)


def _loss(simulated: Simulated, worker: int, round: int) -> float:
    """The mean loss of a worker's local steps from the initial parameters."""
    from mpitrain.data.keyed import key
    r, theta, total, n = simulated.rounds, simulated.theta.copy(), 0.0, 0
    for _, places in r.local.batches(len(r.rows_of[worker]), key(0, "worker", worker, round)):
        rows = r.rows_of[worker][places]
        scores = simulated.x[rows] @ theta.T
        total += (np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(rows)), simulated.y[rows]]).sum()
        n += len(rows)
        theta -= simulated.config.optimizer.lr * simulated.gradient(theta, rows)
    return float(total / n)


def test_a_round_without_anybody_is_a_step_of_zero(config: Path) -> None:
    ok(train(2, config, "workers.each_round=poisson:0.001", "train.micro_batches=2"))
    run = config.parent / "runs/run"
    expected = Simulated(config, "workers.each_round=poisson:0.001")
    assert all(not len(expected.rounds.draw.drawn(round)) for round in range(6))
    assert [(line["workers"], line["loss"], line["grad_norm"]) for line in steps(run)] == [(0, 0.0, 0.0)] * 6
    assert np.array_equal(parameters(run), expected.theta) and record(run)["steps"] == 6


def test_drift_is_the_workers_distance_from_their_mean(config: Path) -> None:
    ok(train(2, config, "train.steps=1"))
    simulated = Simulated(config)
    start, r = simulated.theta.copy(), simulated.rounds
    simulated.changes = {}
    arrived = r.draw.arrived(0)
    weights = r.weights(arrived)
    deltas = [simulated.worker(int(worker), 0, 0.0, False, 0.0) for worker in arrived]
    mean = sum((w * d for w, d in zip(weights, deltas)), np.zeros_like(start))
    apart = np.sqrt(sum(w * ((d - mean) ** 2).sum() for w, d in zip(weights, deltas)))
    line, = steps(config.parent / "runs/run")
    assert line["drift"] == pytest.approx(apart, rel=1e-9) and line["grad_norm"] == pytest.approx(np.sqrt((mean ** 2).sum()))
    assert (line["round"], line["workers"], line["dropped"]) == (1, 6, 0)


@pytest.mark.parametrize(("words", "line"), [
    (("workers.count=2000",), "workers.count = 2000 is more than the 1437 training rows"),
    (("workers.each_round=31",), "workers.each_round = 31 must be 1 to workers.count = 30"),
    (("workers.each_round=-1",), "workers.each_round = -1 must be 1 to"),
    (("workers.each_round=poisson:0",), 'with a probability above 0, at most 1, found "poisson:0"'),
    (("workers.each_round=poisson:2",), 'found "poisson:2"'),
    (("workers.each_round=some",), 'found "some"'),
    (("workers.buffer=2",), "workers.buffer is for workers that do not wait for each other; set workers.arrival"),
    (("workers.drop=1",), "workers.drop = 1 must be 0 or more and below 1"),
    (("workers.rows=dirichlet:0",), '"dirichlet:0" needs the concentration'),
    (("workers.rows=dirichlets:1",), 'unknown partition "dirichlets"'),
    (("workers.rows=column:writer",), '"column:writer" must be one of the inputs by name; data.x names none'),
    (("workers.correct=scafold",), 'unknown correction "scafold"'),
    (("workers.correct=prox:-1",), '"prox:-1" needs a number of 0 or more'),
    ((*SCAFFOLD, "optimizer.momentum=0.9"), "which it is for plain SGD alone"),
    ((*SCAFFOLD, "optimizer.name=adamw", "optimizer.momentum=0.9"), "which it is for plain SGD alone"),
    ((*SCAFFOLD, "optimizer.groups=[{params=['*bias'], lr=0.1}]"), "found parameters with rules of their own"),
    (("optimizer.name=lbfgs", "optimizer.momentum=0.9"), "computes the loss of a step several times"),
    (("comm.sharding=optimizer",), 'found comm.sharding = "optimizer"; set comm.sharding = "none"'),
    (("comm.node_shared=true",), "found comm.node_shared = true"),
    (("train.threads=2",), "[workers] needs one BLAS thread a rank"),
    (("train.steps=0", "train.epochs=2"), "a federation's length is its rounds"),
    (("workers.each_round=1",), "a round of about 1 workers leaves some of 2 ranks without one; run with -n 1 or less, or set "
                                "workers.each_round to 2 or more"),
    (("train.micro_batches=1",), "a round of about 6 workers with seats for 1, train.micro_batches = 1, leaves some of 2 ranks "
                                 "without one; run with -n 1 or less, or set train.micro_batches to 2 or more"),
    (("sync.levels=[{over='workers', delay=1}]",), "sync.delay = 1 is not for [[sync]] over workers"),
    (("sync.levels=[{over='workers'}, {over='site', every=5}]",), 'has one level of [[sync]], over = "workers"'),
    (("sync.levels=[{over='workers', outer='fedadm'}]",), 'unknown outer rule "fedadm"'),
    (("mesh.pp=2", "model.hidden=[8]"), "found mesh.pp = 2; set mesh.pp = 1")])
def test_what_a_federation_cannot_be_is_one_line(config: Path, words: tuple[str, ...], line: str) -> None:
    result = train(2, config, *words)
    assert result.rc == 78 and len(result.error_lines) == 1 and line in result.error_lines[0], result.out + result.err
    assert not (config.parent / "runs").exists()


def test_inspect_refuses_what_train_refuses_and_says_what_there_is(config: Path) -> None:
    result = mpirun(1, "-m", "mpitrain", "inspect", config)
    assert result.rc == 0 and "30 workers of 47 to 48 rows, 6 in a round" in result.out, result.out + result.err
    result = mpirun(1, "-m", "mpitrain", "inspect", config, "workers.drop=1")
    assert result.rc == 78 and "workers.drop" in result.error_lines[0]


def test_running_statistics_are_refused(config: Path) -> None:
    (config.parent / "net.py").write_text("from mpitrain import nn\n\n\ndef net():\n"
                                          "    return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))\n")
    config.write_text(DIGITS.replace('name = "mlp"\ninputs = 64\nhidden = []\noutputs = 10', 'name = "net.py:net"'))
    result = train(1, config)
    assert result.rc == 78 and "keeps statistics of the rows it has seen" in result.error_lines[0], result.out + result.err


def test_a_loss_that_is_not_finite_names_the_worker(config: Path) -> None:
    result = train(2, config, "optimizer.lr=3e38", "train.precision=float32")
    line, = result.error_lines
    assert result.rc == 79 and "worker " in line and "local step" in line


def test_labels_that_are_no_classes_have_no_dirichlet(config: Path) -> None:
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    np.savez(config.parent / "values.npz", x=x, y=x[:, :10])
    ok(mpirun(1, "-m", "mpitrain", "data", "import", "npz", "values.npz", "--out", "values", cwd=config.parent))
    words = ("data.path=values", "train.loss=mse", "data.transform=[]")
    refused(train(1, config, *words), 78, "is of classes, a label of 0 or more for each row")
    ok(train(1, config, *words, "workers.rows=iid", "workers.count=8"))


def test_workers_of_a_row_train_on_it(config: Path) -> None:
    ok(train(2, config, "workers.count=1437", "workers.rows=iid", "workers.each_round=4", "train.steps=2"))
    assert [line["workers"] for line in steps(config.parent / "runs/run")] == [4, 4]


def test_the_model_of_a_federation_is_evaluated_as_any_and_its_rounds_are_not_replayed(config: Path) -> None:
    ok(train(2, config))
    told = ok(mpirun(1, "-m", "mpitrain", "evaluate", "runs/run", cwd=config.parent)).out.splitlines()[-1]
    metrics = record(config.parent / "runs/run")["metrics"]
    assert {name: json.loads(told)[name] for name in ("loss", "accuracy")} == metrics
    refused(mpirun(1, "-m", "mpitrain", "replay", "runs/run", "--step", "2", cwd=config.parent), 64, "a round of workers")


def test_a_column_of_the_data_gives_each_of_its_values_a_worker(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["x"], file["y"] = random.normal(size=(120, 6)).astype(np.float32), random.integers(0, 3, 120)
        file["who"] = np.arange(120, dtype=np.int64) % 7 * 11
    (tmp_path / "net.py").write_text("from mpitrain import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
                                     "        super().__init__()\n        self.head = nn.Linear(6, 3)\n\n"
                                     "    def forward(self, x, who):\n        return self.head(x)\n")
    config = write(tmp_path, DIGITS.replace('name = "mlp"\ninputs = 64\nhidden = []\noutputs = 10', 'name = "net.py:Net"')
                   .replace('path = "digits"\ntransform = ["scale"]',
                            'path = "d.h5"\nvalidation = 0\nx = {x = "x", who = "who"}\ny = "y"'))
    words = ("workers.rows=column:who", "workers.count=7")
    assert "7 workers of 17 to 18 rows" in ok(train(2, config, *words)).out
    refused(train(1, config, *words, "workers.count=6", "run.out=b"), 78, "has 7 different values", "set it to 7")
    refused(train(1, config, "workers.rows=column:x", "run.out=b"), 78, "needs one whole number for each row, found float32")


def test_a_users_own_correction_is_used_as_ours_are(config: Path) -> None:
    folder = config.parent
    (folder / "mine.py").write_text("from mpitrain.parallel.workers.corrections import Correction\n\n\nclass Mine(Correction):\n"
                                    "    def begin(self, turn, start):\n        self.start = start\n\n"
                                    "    def add(self, gradient, theta):\n        gradient += 0.5 * (theta - self.start)\n\n\n"
                                    "def other():\n    pass\n")
    for name, out in (("mine.py:Mine", "own"), ("prox:0.5", "ours"), ("", "none")):
        ok(train(2, config, f"workers.correct={name}", f"run.out={out}", "train.steps=2"))
    own, ours, none = (record(folder / out)["parameters_sha256"] for out in ("own", "ours", "none"))
    assert own == ours != none
    refused(train(1, config, "workers.correct=mine.py:other", "run.out=b"), 78, "must name a subclass of")


def test_a_model_of_text_with_dropout_has_one_hash_on_any_ranks(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    config = write(tmp_path, GPT + "[workers]\ncount = 9\neach_round = 4\n[[sync]]\nover = 'workers'\nevery = 3\n"
                                   "outer = 'nesterov'\nlr = 0.7\n")
    for n in (1, 3):
        ok(train(n, config, f"run.out=on{n}", "train.steps=3", "train.micro_batches=4"))
    assert len({record(tmp_path / f"on{n}")["parameters_sha256"] for n in (1, 3)}) == 1


def test_a_default_run_imports_nothing_of_federations(tmp_path: Path) -> None:
    program = ("import sys; from mpitrain.cli import main\n"
               "try:\n    main(['train', 'train.steps=2', 'train.epochs=0', '--quiet', 'run.out=a'])\n"
               "except SystemExit:\n    pass\n"
               "names = ('.workers', '.federation', '.rounds', '.partitions', '.by_rule', '.hosted')\n"
               "print([m for m in sys.modules if m.startswith('mpitrain') and any(name in m for name in names)])")
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False,
                          env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                               "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "HOME": str(tmp_path)})
    assert done.stdout.splitlines()[-1] == "[]" and json.loads((tmp_path / "a/run.json").read_text())["status"] == "done", done
