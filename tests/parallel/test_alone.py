"""A model that several ranks have together runs on one of them alone: each layer's stand-in answers in the right shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import models, nn
from mpitrain.autograd import Tensor
from mpitrain.config import CommConfig, MeshConfig, TrainConfig
from mpitrain.parallel.gradients.replicas import SumOverRanks
from mpitrain.parallel.layers.join import alone
from mpitrain.parallel.pipeline.nonfinite import nobody_else
from mpitrain.placement.place import place
from mpitrain.schedules.grid import Grid


def connected(lengths: dict[str, int], sequence: bool = False, **more: Any) -> nn.Module:
    model = models.gpt(2, 2, 16, 8, 12, **more)
    alone(place(model, Grid(lengths, dict.fromkeys(lengths, 1)), MeshConfig(sequence=sequence), TrainConfig(), CommConfig()))
    model.initialize(0)
    return model


@pytest.mark.parametrize(("lengths", "more", "length", "outputs", "missed"), [
    ({"tp": 2}, {}, 8, 6, []), ({"tp": 2}, {"sequence": True}, 8, 6, []),
    ({"cp": 2}, {}, 4, 12, ["another rank's positions (mesh.cp)"]),
    ({"ep": 2}, {"experts": 4}, 8, 12, ["an expert of another rank (mesh.ep)"])], ids=str)
def test_a_stand_in_of_each_layer_gives_the_shape_and_asks_nobody(lengths: Any, more: Any, length: int, outputs: int,
                                                                  missed: list[str]) -> None:
    model = connected({axis: lengths.get(axis, 1) for axis in ("pp", "dp", "ep", "cp", "tp")}, **more)
    asking = [module for _, module in model.named_modules() if module.across is not None]
    x = Tensor(np.arange(3 * length).reshape(3, length) % 12)
    known = model(x)
    assert asking and known.shape == (3, length, outputs) and np.isfinite(known.array).all()
    before = [module.across for module in asking]
    with nobody_else(model) as words:
        assert words == missed
        assert all((module.across is across) == across.lockstep for module, across in zip(asking, before))
    assert [module.across for module in asking] == before
    for module, across in zip(asking, before):
        module.across = across.alone()
    assert model(x).array.tobytes() == known.array.tobytes()


def test_batch_statistics_of_a_rank_alone_are_its_own() -> None:
    array = np.arange(3.0)
    SumOverRanks(None).alone().reduce(array)
    assert (array == [0, 1, 2]).all()
