"""Committed hashes of short runs: a change of the code that changes a bit is seen, on the machines that golden.json knows.

Bits depend on the CPU's instructions, BLAS, the compilers and their versions, so an entry is for one such fingerprint. Where
there is none the test skips, and says the entry to add.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from runs import record, steps, train, write

from mpitrain.data.importers import import_text

GOLDEN = Path(__file__).with_name("golden.json")
NAMES_ONLY = ("mpitrain", "cpu", "micro_batches")             # these name something, and decide no bit
RUN = """
[model]
{model}
[data]
{data}
[optimizer]
lr = 3e-3
schedule = "cosine"
warmup_steps = 2
weight_decay = 0.01
clip_norm = 0.5
[train]
steps = 8
batch_size = 24
micro_batches = 4
reproducible = "layout"
[log]
every = 1
"""
MODELS = {"mlp": 'name = "mlp"\ninputs = 64\nhidden = [48, 32]\noutputs = 10', "lenet": 'name = "lenet"\nsize = 16',
          "gpt": 'name = "gpt"\nlayers = 2\nheads = 2\nwidth = 32\nblock = 16\nvocabulary = 30\ndropout = 0.1'}
DATA = {"mlp": 'path = "digits"\ntransform = ["standardise"]', "lenet": 'path = "grey.h5"\nx = "x"\ny = "y"',
        "gpt": 'path = "text"\nvalidation = "tail:0.1"'}


def make_data(folder: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(folder / "grey.h5", "w") as file:
        file["x"] = rng.standard_normal((120, 1, 16, 16)).astype(np.float32)
        file["y"] = np.concatenate([np.arange(10), rng.integers(0, 10, 110)])
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "off.\n"]
    (folder / "text.txt").write_text(" ".join(words[i] for i in rng.integers(0, len(words), 900)))
    import_text(folder / "text.txt", folder / "text")


def fingerprint(numerics: dict[str, Any]) -> str:
    """The key of golden.json. Our own sources are no part of it: their changes are what the hashes are to show."""
    kept = {name: value.partition(" ")[0] if value.startswith("compiled ") else value for name, value in numerics.items()
            if name not in NAMES_ONLY}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def outcome(folder: Path, model: str, ranks: int, *keys: str) -> tuple[dict[str, Any], str]:
    """(numerics, one hash over parameters, buffers and every loss) of the run of a model."""
    if not (folder / "text").exists():
        make_data(folder)
    config = write(folder, RUN.format(model=MODELS[model], data=DATA[model]), f"{model}.toml")
    result = train(ranks, config, f"run.out={model}", "--overwrite", *keys)
    assert result.rc == 0, result.err
    found = record(folder / model)
    losses = [line["loss"].hex() for line in steps(folder / model)]
    text = json.dumps([found["parameters_sha256"], found["buffers_sha256"], losses])
    return found["numerics"], hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.promise("D6")
@pytest.mark.parametrize(("model", "ranks"), [("mlp", 3), ("lenet", 2), ("gpt", 1)])
def test_a_short_run_ends_with_the_committed_hash(tmp_path: Path, model: str, ranks: int) -> None:
    numerics, found = outcome(tmp_path, model, ranks)
    key = fingerprint(numerics)
    known = json.loads(GOLDEN.read_text())
    if model not in known.get(key, {}):
        about = f"{numerics['blas']}; numpy {numerics['numpy']}; {numerics['cpu']}"
        entry = json.dumps({key: {"about": about, model: found}})
        pytest.skip(f"golden.json has no entry for this machine; it would be {entry}")
    assert found == known[key][model], f"{model} on {ranks} ranks ended with other bits than committed ({key})"


@pytest.mark.promise("D6")
def test_a_change_of_one_bit_of_arithmetic_is_another_hash(tmp_path: Path) -> None:
    """The control: the same run with a learning rate that differs in the last place of float32."""
    rate = float(np.nextafter(np.float32(3e-3), np.float32(1)))
    assert outcome(tmp_path, "mlp", 1, f"optimizer.lr={rate!r}")[1] != outcome(tmp_path, "mlp", 1)[1]
