"""Attention put together from parts, and what cannot be cut along positions."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain import data, models, nn
from mpitrain.config import MeshConfig, load_config
from mpitrain.data import importers
from mpitrain.errors import ConfigError, MeshError
from mpitrain.kernels.flash_attention import flash_attention, join_attention
from mpitrain.parallel.layers.context_parallel import AcrossPositions
from mpitrain.parallel.layers.ring_attention import LoneRing
from mpitrain.placement.zigzag import refuse_model
from mpitrain.plan.inspect import inspect_config
from mpitrain.train.build.inputs import Inputs


def test_attention_to_some_keys_and_to_others_is_joined_to_attention_to_all() -> None:
    """Scores so far apart that one part's weights vanish, either way round, and a part whose keys nobody may look at."""
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((3, 2, 3, 20, 7))
    k[:, :, 3] *= 200
    whole = np.empty_like(q)
    known = flash_attention(q, k, v, whole, 0.7, False, None)
    for cut in (3, 4, 19):
        for order in (1, -1):
            found: list[Any] = []
            for keys in (slice(0, cut), slice(cut, None))[::order]:
                part = np.empty_like(q)
                found += [part, *flash_attention(q, k[:, :, keys], v[:, :, keys], part, 0.7, False, None)]
            join_attention(*found)
            for one, expected in zip(found, (whole, *known)):
                np.testing.assert_allclose(one, expected, rtol=1e-12, atol=1e-13)
    for nothing_first in (True, False):
        nothing = [np.zeros_like(q), np.zeros((2, 3, 20)), np.zeros((2, 3, 20))]
        mine = [whole.copy(), *(x.copy() for x in known)]
        first, second = (nothing, mine) if nothing_first else (mine, nothing)
        join_attention(*first, *second)
        for one, expected in zip(first, (whole, *known)):
            np.testing.assert_allclose(one, expected, rtol=1e-12)
    nothing = [np.zeros((2, 2, 3, 20, 7)), np.zeros((2, 2, 3, 20)), np.zeros((2, 2, 3, 20))]
    join_attention(*(x[0] for x in nothing), *(x[1] for x in nothing))
    assert not any(x.any() for x in nothing)


class Mixing(nn.Sequential):
    """Says of itself what a Sequential says, but has a forward of its own."""

    def forward(self, x: Any) -> Any:
        return super().forward(x[:, ::-1])


class Apart(Mixing):
    """Says it anew."""

    by_position = True


def test_models_that_mix_positions_are_refused_by_the_name_of_a_layer() -> None:
    for model, layer in ((models.lenet(), '"conv1" (Conv2d)'), (nn.Sequential(nn.LSTM(3, 4)), '"0" (LSTM)'),
                         (nn.Sequential(nn.LayerNorm((3, 4))), '"0" (LayerNorm)'),
                         (nn.Sequential(nn.Softmax(1)), '"0" (Softmax)'),
                         (nn.Sequential(("a", Mixing(nn.ReLU()))), '"a" (Mixing)'), (Mixing(), '"the model" (Mixing)')):
        with pytest.raises(ConfigError, match=re.escape(f"mesh.cp = 2 cuts samples along their positions, and {layer}")):
            refuse_model(model, 2)
    refuse_model(nn.Sequential(Apart(nn.ReLU()), nn.RMSNorm(3), nn.Linear(3, 3, activation="tanh"), nn.Softmax()), 2)
    refuse_model(models.gpt(layers=1, heads=1, width=4, block=8, vocabulary=5), 2)
    with pytest.raises(ConfigError, match=r'cuts samples, and experts \("block0.mixture"\) choose among whole ones; set'):
        refuse_model(models.gpt(layers=1, heads=1, width=4, block=8, vocabulary=5, experts=2), 2)


def test_a_mask_is_refused() -> None:
    across = AcrossPositions(LoneRing(0, 2), "block0.attention")
    assert across.forward(lambda x: x, 3) == 3
    with pytest.raises(ConfigError, match=r'mesh.cp = 2 cuts .* "block0.attention" is given a mask of whole samples'):
        across.forward(lambda x: x, 3, np.ones((4, 4), bool))


@pytest.mark.parametrize(("block", "rows"), [(8, 256), (64, 256), (4096, 4), (40000, 1)])
def test_long_windows_are_evaluated_a_few_at_a_time(block: int, rows: int) -> None:
    class Windows(data.TokenWindows):
        names = ("x", "y")

        def __init__(self) -> None:
            self.block = block

        def read(self, rows: Any) -> Any:
            return np.zeros((2, len(rows), 1), np.int64)

    windows, every = Windows(), range(300)
    read, n = Inputs(windows, every, windows, every, data.Transforms()).chunks(None)
    assert n == -(-300 // rows) and sum(len(read(chunk)[0]) for chunk in range(n)) == 300 and len(read(0)[0]) == rows


def test_inspect_prints_the_axis_and_each_ranks_positions(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("".join(chr(32 + i * i % 64) for i in range(4000)))
    importers.import_text(tmp_path / "corpus.txt", tmp_path / "tokens")
    config = load_config(Path(__file__).parents[2] / "examples/shakespeare.toml", [
        "model.block=64", f"data.path={tmp_path}/tokens"])
    lines = list(inspect_config(dataclasses.replace(config, mesh=MeshConfig(cp=4)), 8))
    assert "mesh pp=1 x dp=2 x cp=4 x tp=1, 8 ranks" in lines and "samples of 64 positions, 16 on each rank" in lines
    with pytest.raises(MeshError, match=r"mesh.cp = 3 cuts .* 64, no multiple of 6; the nearest that fits: 60 or 66"):
        list(inspect_config(dataclasses.replace(config, mesh=MeshConfig(cp=3)), 3))
