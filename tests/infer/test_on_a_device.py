"""Generation on the stand-in for a GPU: the logits of whole texts, and what a token launches, waits for and brings down."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device_on_host import compiler
from fakegpu import counted, put, xp

from mpitrain.autograd import no_grad
from mpitrain.backend import Device
from mpitrain.infer.cache import Cache
from mpitrain.infer.sample import likeliest, likeliest_there
from mpitrain.models import MODELS

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
GPU = Device("gpu", xp)
GPT: dict[str, Any] = {"layers": 2, "heads": 2, "width": 32, "block": 40, "vocabulary": 90, "bias": True}
LLAMA: dict[str, Any] = {"layers": 2, "heads": 4, "key_heads": 2, "width": 32, "hidden": 48, "block": 40, "vocabulary": 90}
# Launches of a token: of each block; of all else: embedding, positions, the last norm, the head, and the choice.
BUDGET = {"gpt": (10, 10), "llama": (19, 8)}
FORMATS = {"float32": np.dtype("float32"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
CLOSE = {"float32": 2e-5, "bfloat16": 6e-2}


def model_of(kind: str, dtype: str, device: Device | None = None, **more: Any) -> Any:
    model = MODELS[kind](**{**(GPT if kind == "gpt" else LLAMA), **more})
    model.initialize(3, dtype, **({"device": device} if device is not None else {}))
    model.eval()
    return model


@pytest.mark.parametrize(("kind", "dtype"), [("gpt", "float32"), ("gpt", "bfloat16"), ("llama", "float32")])
def test_logits_with_a_cache_are_those_of_the_whole_text_on_the_host(kind: str, dtype: str) -> None:
    """Texts that begin alone, are somewhere else each, and go on together; slots are in no order."""
    tokens = np.random.default_rng(1).integers(0, 90, (2, 20))
    with no_grad():
        wanted = model_of(kind, "float32")(tokens).array
        model = model_of(kind, dtype, GPU)
        cache, starts = Cache(model, 3, 40, FORMATS[dtype], GPU), [3, 9]

        def close(found: Any, right: np.ndarray) -> bool:
            return bool(np.abs(found.array.get().astype("float64") - right).max() < CLOSE[dtype] * np.abs(wanted).max())
        for row, slot in enumerate([2, 0]):
            cache.use([slot], [0])
            assert close(model(cache.bring(tokens[row:row + 1, :starts[row]])), wanted[row:row + 1, :starts[row]])
        for place in range(4):
            at = [start + place for start in starts]
            cache.use([2, 0], at)
            assert close(model(cache.bring(tokens[[0, 1], at][:, None])), wanted[[0, 1], at][:, None])


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_token_waits_once_brings_little_up_and_down_and_makes_no_more_launches_than_it_may(kind: str) -> None:
    """The one wait is for the token itself. Its cost does not depend on how long the text is: nothing grows or is copied."""
    def token(model: Any, cache: Cache, at: int) -> Any:
        with no_grad(), counted() as counts:
            cache.use([1, 0], [at, at])
            likeliest_there(model(cache.bring(np.array([[4], [5]]))).array[:, -1])
        return counts
    found = []
    for layers in (1, 2):
        model = model_of(kind, "float32", GPU, layers=layers)
        cache = Cache(model, 2, 40, np.float32, GPU)
        memory = [layer.keys for layer in cache.layers]
        token(model, cache, 3)
        early, late = token(model, cache, 4), token(model, cache, 39)
        assert early == late and early.n_syncs == 1
        assert early.up <= 64 + 1024 * layers and early.down == 2 * 16
        assert all(layer.keys is kept for layer, kept in zip(cache.layers, memory))
        found.append(early.n_launches)
    each, rest = found[1] - found[0], 2 * found[0] - found[1]
    assert (each, rest) == BUDGET[kind], "write down fewer; more are too many"


def test_the_largest_logit_on_a_device_is_that_of_the_host_and_no_number_is_found() -> None:
    logits = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
    logits[1, 5] = logits[1, 2] = 7
    logits[2, 6] = np.nan
    for row, (values, places) in zip(logits, likeliest_there(put(logits))):
        wanted = likeliest(row, 1)
        np.testing.assert_array_equal(values, wanted[0])
        assert places.tolist() == wanted[1].tolist()
