"""A pass whose kernels are idle takes the memory of one that computes, and leaves the kernels as they were."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from mpitrain.backend.memory import pool_in_use
from mpitrain.config import load_config
from mpitrain.data.importers import import_text
from mpitrain.kernels.idle import LARGE, idle
from mpitrain.kernels.kernel import kind
from mpitrain.kernels.linear import linear
from mpitrain.plan import activations
from mpitrain.plan.memory import forecast_of
from mpitrain.plan.prepare import grid_of, open_data, prepare
from mpitrain.train.build.sizes import with_sizes

pytestmark = pytest.mark.usefixtures("counted")
needs_c = pytest.mark.skipif(kind() != "c", reason="kernels run as C, which needs a compiler")
MODELS = {"gpt": 'name = "gpt"\nlayers = 2\nheads = 2\nwidth = 32\nblock = 16\ndropout = 0.1\n',
          "experts": 'name = "gpt"\nlayers = 2\nheads = 2\nwidth = 32\nblock = 16\nexperts = 4\n',
          "llama": 'name = "llama"\nlayers = 2\nheads = 2\nwidth = 32\nblock = 16\n',
          "resnet20": 'name = "resnet20"\nchannels = 1\n', "mlp": 'name = "mlp"\nhidden = [64, 32]\n'}


@needs_c
@pytest.mark.parametrize("model", MODELS)
def test_the_forecast_is_that_of_a_pass_that_computes(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("".join(chr(97 + i * i % 23) for i in range(1000)))
    data = "digits" if model in ("resnet20", "mlp") else "tokens"
    if data == "tokens":
        import_text(tmp_path / "corpus.txt", tmp_path / "tokens")
    (tmp_path / "run.toml").write_text(f'[model]\n{MODELS[model]}[data]\npath = "{data}"\nvalidation = 0\n'
                                       '[train]\nsteps = 4\nbatch_size = 32\n')
    config = load_config(tmp_path / "run.toml", [])
    inputs = open_data(config)
    config = with_sizes(config, inputs)
    found = []
    for computes in (False, True, False):
        if computes:
            monkeypatch.setattr(activations, "idle", nullcontext)
        run = prepare(config, grid_of(config, 1), inputs)
        found.append(forecast_of(config, run.placed(), inputs))
        monkeypatch.undo()
    assert found[0] == found[1] == found[2] and found[0].stages[0].activations


@needs_c
def test_idle_kernels_take_memory_and_compute_nothing_until_they_are_left() -> None:
    x, weight = np.ones((64, 32), np.float32), np.ones((16, 32), np.float32)
    expected = linear(x, weight, None, None, False)[0]
    pool = pool_in_use()
    assert pool is not None and np.all(expected == 32)
    with idle():
        before = pool.usage().used
        found = linear(x, weight, None, None, False)[0]
        assert pool.usage().used - before >= found.nbytes == expected.nbytes < LARGE
        assert found.shape == expected.shape and not found.any()
    np.testing.assert_array_equal(linear(x, weight, None, None, False)[0], expected)
