"""What cannot be private is refused with one line before anything runs, by `inspect` as by `train`."""

from __future__ import annotations

from pathlib import Path

import pytest
from private_configs import CLIENTS, ROWS
from runs import write

from mpitrain.config import load_config
from mpitrain.errors import ConfigError, MeshError, UsageError
from mpitrain.plan.inspect import inspect
from mpitrain.privacy.accountant import RenyiAccountant
from mpitrain.run.replay import by_itself

REFUSED = [
    ("rows.toml", ["privacy.noise=0.0"], "privacy.noise = 0 hides nobody; set privacy.noise to 1.0, say"),
    ("clients.toml", ["privacy.noise=0.0", "privacy.secure=true"], "though privacy.secure = true: masks hide each client's part"),
    ("rows.toml", ["privacy.noise=hidden"], 'privacy.noise must be a number of 0 or more, or "seeded:1.1" for tests'),
    ("rows.toml", ["privacy.noise=seeded:nan"], "privacy.noise must be a number of 0 or more"),
    ("rows.toml", ["privacy.noise=seeded:inf"], "privacy.noise must be a number of 0 or more"),
    ("rows.toml", ["privacy.noise=-1.0"], "privacy.noise must be a number of 0 or more"),
    ("rows.toml", ["privacy.noise=1.0", "privacy.epsilon=3.0"], "are both given, and noise is found for an epsilon"),
    ("rows.toml", ["privacy.noise=0.0", "privacy.epsilon=1e-9", "train.steps=100000"], "privacy.epsilon = 1e-09 cannot be had"),
    ("rows.toml", ["privacy.noise=0.0", "privacy.epsilon=1.0", "privacy.sampling=shuffle"],
     'privacy.epsilon = 1 cannot be had: privacy.sampling = "shuffle" cuts an order of all rows'),
    ("clients.toml", ["privacy.noise=0.0", "privacy.epsilon=1.0", "workers.each_round=8"],
     'privacy.epsilon = 1 cannot be had: workers.each_round = 8 draws that many clients, and accountants hold where each is '
     'drawn for itself: workers.each_round = "poisson:0.4"'),
    ("rows.toml", ["privacy.delta=0.001"], "privacy.delta = 0.001 is more than 1 / 1437, the number of samples"),
    ("clients.toml", ["privacy.delta=0.06"], "privacy.delta = 0.06 is more than 1 / 20, the number of clients"),
    ("rows.toml", ["privacy.delta=0.0"], "privacy.delta must be more than 0 and below 1, found 0"),
    ("rows.toml", ["privacy.clip=0.0"], "privacy.clip must be more than 0, found 0"),
    ("clients.toml", ["privacy.threshold=0.5", "privacy.secure=true"],
     "privacy.threshold must be more than 0.5, at most 1, found 0.5"),
    ("clients.toml", ["privacy.threshold=0.7"], "privacy.threshold = 0.7 is for privacy.secure = true; leave it out"),
    ("clients.toml", ["privacy.secure=true", "train.on_nan=skip"], "which neither clip nor noise bounds"),
    ("clients.toml", ["train.on_nan=skip"], "which neither clip nor noise bounds"),
    ("rows.toml", ["train.on_nan=rewind"], 'with [privacy] set train.on_nan = "stop"'),
    ("rows.toml", ["privacy.secure=true"], 'privacy.secure is for privacy.unit = "client"'),
    ("rows.toml", ["privacy.unit=client"], "there is none; set workers.count"),
    ("clients.toml", ["privacy.unit=sample"], 'set privacy.unit = "client"'),
    ("rows.toml", ["privacy.unit=none"], "privacy.noise is there, and nobody is hidden"),
    ("rows.toml", ["privacy.accountant=rpd"], 'privacy.accountant = "rpd" is not there (did you mean "rdp"?)'),
    ("rows.toml", ["privacy.accountant=own.py:Wrong"], "is a number of 0 or more, found own.py:Wrong, which gives 'much'"),
    ("clients.toml", ["privacy.sampling=shuffle"], 'privacy.sampling = "shuffle" is for rows'),
    ("clients.toml", ["workers.correct=scaffold"], "makes clients send more than the change that privacy.clip bounds"),
    ("rows.toml", ["train.micro_batches=4", "privacy.by_row=true"], "privacy.by_row = true makes each row a micro-batch"),
    ("clients.toml", ["privacy.by_row=true"], "of a client, the whole change is clipped; leave it out"),
    ("rows.toml", ["train.reproducible=layout"], "needs train.micro_batches"),
    ("rows.toml", ["train.batch_size=2000"], "train.batch_size = 2000 is more than the 1437 training rows"),
    ("rows.toml", ["comm.sharding=optimizer"], 'found comm.sharding = "optimizer"; set comm.sharding = "none"'),
    ("rows.toml", ["comm.wire_dtype=bfloat16"], 'found comm.wire_dtype = "bfloat16"'),
    ("rows.toml", ["sync.levels=[{every = 2}]"], "found [[sync]]; set no level of exchange"),
    ("rows.toml", ["optimizer.name=lbfgs", "optimizer.momentum=0.9"], "and each one tells of the rows"),
    ("norm.toml", [], 'the layer "norm" (BatchNorm1d) keeps statistics of all rows, which no noise hides'),
    ("mixed.toml", [], "sends rows to experts by what other rows do"),
    ("clients.toml", ["privacy.secure=true", "privacy.clip=1e-320"], "does not fit")]
OWN = """
from mpitrain import nn
def norm(): return nn.Sequential(("flat", nn.Flatten()), ("first", nn.Linear(64, 8)), ("norm", nn.BatchNorm1d(8)),
                                 ("head", nn.Linear(8, 10)))
class Wrong:
    def epsilon(self, history, delta): return "much"
def mixed(): return nn.Sequential(("flat", nn.Flatten()), ("experts", nn.MixtureOfExperts(64, 16, 4)),
                                  ("head", nn.Linear(64, 10)))
"""


def folder_of(path: Path) -> Path:
    write(path, ROWS, "rows.toml")
    write(path, CLIENTS, "clients.toml")
    (path / "own.py").write_text(OWN)
    for name in ("norm", "mixed"):
        write(path, ROWS.replace('"mlp", inputs = 64, hidden = [], outputs = 10', f'"own.py:{name}"'), f"{name}.toml")
    return path


@pytest.mark.parametrize("name, keys, said", REFUSED)
def test_what_cannot_be_private_is_refused_with_one_line(tmp_path: Path, name: str, keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(inspect(folder_of(tmp_path) / name, keys))
    assert said in caught.value.message and "\n" not in str(caught.value) and caught.value.exit_code == 78


def test_parts_of_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="clips the gradient of each row by itself, and mesh.tp = 2 does not sum whole ones"):
        list(inspect(folder_of(tmp_path) / "rows.toml", ["mesh.tp=2"], ranks=2))


def test_inspect_says_the_claim(tmp_path: Path) -> None:
    told = "\n".join(inspect(folder_of(tmp_path) / "rows.toml", ["privacy.noise=1.0", "train.steps=20"]))
    epsilon = RenyiAccountant().epsilon({(16 / 1437, 1.0): 20}, 1e-5)
    assert f"privacy: epsilon {epsilon:.4g} at delta 1e-05 after 20 steps" in told
    assert "for the presence of one row among 1437, each drawn by itself" in told and "are one user's" in told


def test_the_claim_of_a_secure_sum_says_what_it_takes_for_given(tmp_path: Path) -> None:
    """With one more client a round may have enough of them: the sum of all others is in the model then."""
    path, keys = folder_of(tmp_path) / "clients.toml", ["privacy.noise=1.0"]
    assumed = "as if rounds with too few clients were left out whoever is there"
    assert assumed in "\n".join(inspect(path, [*keys, "privacy.secure=true"])) and assumed not in "\n".join(inspect(path, keys))


def test_a_step_of_a_private_run_is_not_computed_again(tmp_path: Path) -> None:
    """Its rows follow from no seed: others would look like a rank that computes other bits."""
    with pytest.raises(UsageError, match="drawn by a key that nothing has written down"):
        by_itself(load_config(folder_of(tmp_path) / "rows.toml", ["privacy.noise=1.0"]), {"mesh": {"dp": 2}, "threads": 1})
