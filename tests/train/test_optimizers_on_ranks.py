"""Each optimizer on 1, 2 and 3 ranks, with whole states, slices and one copy per node: the same bits, or one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import mpirun

from mpitrain.checkpoint.manifest import load
from mpitrain.config import load_config
from mpitrain.errors import ConfigError
from mpitrain.plan.inspect import inspect_config

PROGRAM = Path(__file__).with_name("optimizers_program.py")
CLOSURE = "lbfgs;weight_decay=0.0;decay=all;line_search_fn=strong_wolfe;history_size=3;max_iter=3"
OTHERS = ("adagrad", "adadelta", "adamax", "nadam;weight_decay=0.1", "radam", "lion;weight_decay=0.1", "asgd;t0=2.0",
          "rprop;weight_decay=0.0;decay=all", "muon", "adamw;amsgrad=true;maximize=true", "rmsprop;centered=true",
          "sgd;dampening=0.5", "lbfgs;weight_decay=0.0;decay=all;max_iter=2")


GROUPS = ('adamw;groups=[{params="*bias",lr_factor=2.0,weight_decay=0.5},{params="linear0.weight",freeze_until=2}]',
          'adamw;groups=[{params="linear0.*",frozen=true}]', 'muon;groups=[{params="head.*",orthogonal=false,lr=1e-4}]',
          'sgd;momentum=0.9;train.reproducible=run;train.micro_batches=2;'
          'groups=[{params="linear0.*",freeze_until=2},{params="head.bias",frozen=true}]')


def runs(folder: Path, *cases: str, timeout: float = 60) -> dict[str, dict[str, str]]:
    """The hash, or the error, of each run of each case: see the program."""
    result = mpirun(3, PROGRAM, folder, *cases, timeout=timeout, cwd=folder)
    assert result.rc == 0, result.err
    rows = [line.split("\t") for line in result.out.splitlines() if "\t" in line]
    return {case: dict(field.split("=", 1) for field in fields) for case, *fields in rows}


def refuse_unlike(found: dict[str, dict[str, str]]) -> None:
    for case, hashes in found.items():
        if case.startswith("lbfgs"):
            sharded = {key: text for key, text in hashes.items() if "whole" not in key}
            assert len(sharded) == 6
            for key, text in sharded.items():
                found_key = "comm.node_shared = true" if "node" in key else 'comm.sharding = "optimizer"'
                assert "LBFGS adds up products over all parameters" in text and found_key in text, (case, key, text)
            hashes = {key: text for key, text in hashes.items() if "whole" in key}
        assert len(set(hashes.values())) == 1 and len(next(iter(hashes.values()))) == 64, (case, hashes)


def test_matrices_and_closures_have_one_hash_on_any_ranks_and_after_resuming(tmp_path: Path) -> None:
    refuse_unlike(runs(tmp_path, "adafactor", CLOSURE))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_every_optimizer_has_one_hash_on_any_ranks_and_after_resuming(tmp_path: Path) -> None:
    refuse_unlike(runs(tmp_path, *OTHERS, timeout=150))


@pytest.mark.slow
def test_groups_of_parameters_have_one_hash_on_any_ranks_and_are_thawed_alike_after_resuming(tmp_path: Path) -> None:
    """The runs that are taken up again stop at step 2, where a group is thawed. The last case has slices of all states."""
    found = runs(tmp_path, *GROUPS)
    refuse_unlike(found)
    hashes = {next(iter(case.values())) for case in found.values()}
    assert len(found) == len(hashes) == len(GROUPS)


def test_a_frozen_layer_has_no_exchange_and_no_state_in_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CUT.replace("tp = 2", "") + FROZEN)
    result = mpirun(2, "-m", "mpitrain", "train", "run.toml", "comm.bucket_mb=0.001", cwd=tmp_path)
    assert result.rc == 0, result.err
    folder = next((tmp_path / "runs/run/checkpoints").iterdir())
    found = load(folder)
    assert "optimizer/m/head.weight" in found.arrays and "optimizer/m/linear0.weight" not in found.arrays
    again = mpirun(1, "-m", "mpitrain", "train", "run.toml", "--resume", "train.steps=3", cwd=tmp_path)
    assert again.rc == 0, again.err
    later = load(next(path for path in (tmp_path / "runs/run/checkpoints").iterdir() if path.name.endswith("3")))
    assert (later.read("parameters/linear0.weight") == found.read("parameters/linear0.weight")).all()
    assert (later.read("parameters/head.weight") != found.read("parameters/head.weight")).any()


def test_an_optimizer_of_whole_matrices_is_refused_where_layers_are_cut(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CUT)
    for name, words in (("muon", "Muon needs"), ("adafactor", "Adafactor needs"), ("lbfgs", "LBFGS adds up")):
        config = load_config(tmp_path / "run.toml", [f"optimizer.name={name}"])
        with pytest.raises(ConfigError, match=f"{words}.*mesh.tp = 2"):
            list(inspect_config(config, 2))


CUT = """
[model]
name = "mlp"
inputs = 64
hidden = [24]
outputs = 10
[data]
path = "digits"
[train]
steps = 2
[mesh]
tp = 2
"""
FROZEN = """
[[optimizer.groups]]
params = "linear0.*"
frozen = true
"""
