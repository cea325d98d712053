"""What State makes of a checkpoint, and a checkpoint of it; also of one that an earlier version wrote (`before/`, two ranks)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpitrain import data, models, optim
from mpitrain.checkpoint import store
from mpitrain.checkpoint.manifest import Checkpoint, load
from mpitrain.checkpoint.state import State
from mpitrain.errors import CheckpointError

BEFORE = Path(__file__).parent / "before/step-00000002"
SHA256 = "a6bb3a3e4529c7e495d6b9e8d918acc11e31e37aad2dd3e017ee4edc80cd687a"          # of its run.json


def state(hidden: int = 3, optimizer: str = "adamw") -> State:
    model = models.mlp(64, [hidden], 10)
    model.initialize(1)
    return State(model, optim.OPTIMIZERS[optimizer](model, lr=0.1), data.Transforms(["standardise"]))


def test_a_checkpoint_of_before_is_read_and_written_again_to_the_bit() -> None:
    found = state()
    found.restore(load(BEFORE))
    assert found.hashes()["parameters_sha256"] == SHA256
    assert found.optimizer is not None and found.optimizer.steps == 2
    checkpoint = load(BEFORE)
    written = {piece.name: piece.array for piece in found.pieces()}
    assert sorted(written) == sorted(checkpoint.arrays)
    for name, array in written.items():
        np.testing.assert_array_equal(array, checkpoint.read(name))
        assert array.dtype == checkpoint.read(name).dtype and (name == "data/0/mean" or array.any() or "bias" in name)


@pytest.mark.parametrize("hidden, optimizer, message", [
    (4, "adamw", r"reshaped \(parameters/"), (3, "sgd", r"\d+ unexpected \(optimizer/m/")])
def test_another_model_or_optimizer_is_refused_before_anything_is_touched(hidden: int, optimizer: str, message: str) -> None:
    found = state(hidden, optimizer)
    before = found.hashes()
    with pytest.raises(CheckpointError, match=message):
        found.restore(load(BEFORE))
    assert found.hashes() == before and found.optimizer is not None and found.optimizer.steps == 0


def test_parameters_alone_come_from_a_run_with_another_optimizer() -> None:
    found = state(optimizer="sgd")
    found.load_parameters(load(BEFORE))
    assert found.hashes()["parameters_sha256"] == SHA256


def test_a_checkpoint_has_the_hashes_of_the_state_that_was_saved(tmp_path: Path) -> None:
    saved = state()
    saved.restore(load(BEFORE))
    found = load(store.save(tmp_path, 3, saved.pieces(), {}))
    assert found.hashes == {"parameters_sha256": SHA256} and load(BEFORE).hashes == {}             # the model has no buffers


@pytest.mark.promise("B5")
def test_values_that_are_not_those_that_were_saved_are_refused_once_they_are_in_memory(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = state()
    saved.restore(load(BEFORE))
    found = load(store.save(tmp_path, 3, saved.pieces(), {}))
    state().restore(found)
    whole = Checkpoint.read

    def damaged(self: Checkpoint, name: str, *place: object) -> np.ndarray:
        values = whole(self, name, *place)                    # type: ignore[arg-type]
        values.reshape(-1)[:1].view(np.uint32)[...] ^= 1 if name.startswith("parameters/") else 0
        return values
    monkeypatch.setattr(Checkpoint, "read", damaged)
    for take in (State.restore, State.load_parameters):
        with pytest.raises(CheckpointError, match="parameters_sha256 of the values in memory is .*, that of the saved"):
            take(state(), found)
