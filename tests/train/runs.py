"""What tests of whole runs share: a small configuration, and what a run leaves in its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch import Job, Result, launch, mpirun

from mpitrain.cli import main

SMALL = """
[model]
name = "mlp"
inputs = 64
hidden = [32]
outputs = 10
[data]
path = "digits"
transform = ["standardise"]
[optimizer]
name = "adamw"
lr = 3e-3
schedule = "cosine"
warmup_steps = 5
clip_norm = 1.0
[train]
steps = 50
batch_size = 48
eval_every = 25
[log]
every = 1
progress_s = 0
"""

# Of a net on standardised digits that trains in a blink; a study, a population or a federation adds its own sections.
DIGITS = """
[model]
name = "mlp"
inputs = 64
hidden = [16]
outputs = 10
[data]
path = "digits"
transform = ["standardise"]
"""

GPT = """
[model]
name = "gpt"
layers = 2
heads = 2
width = 16
block = 8
vocabulary = 64
dropout = 0.1
bias = true
[data]
path = "tokens"
validation = "tail:0.2"
[optimizer]
name = "adamw"
lr = 1e-3
clip_norm = 1.0
[train]
steps = 6
batch_size = 8
micro_batches = 4
eval_every = 3
[log]
every = 1
progress_s = 0
"""


def write_tokens(folder: Path) -> None:
    """The data of GPT."""
    (folder / "text.txt").write_text("the quick brown fox jumps over it " * 40)
    main(["data", "import", "text", str(folder / "text.txt"), "--out", str(folder / "tokens")])


def write(folder: Path, text: str = SMALL, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def train(n: int, config: Path, *arguments: str, timeout: float = 60, **options: Any) -> Result:
    return mpirun(n, "-m", "mpitrain", "train", config, *arguments, timeout=timeout, cwd=config.parent, **options)


def start(n: int, config: Path, *arguments: str, **options: Any) -> Job:
    return launch(n, "-m", "mpitrain", "train", config, *arguments, cwd=config.parent, **options)


def many(folder: Path, *asked: Sequence[Any], timeout: float = 60) -> list[dict[str, Any]]:
    """Runs in `folder` by one start of mpirun, each (ranks, "run.toml", keys ...) or (ranks, "evaluate", run, step): what each
    has found or been refused for (many_program.py)."""
    most = max(n for n, *_ in asked)
    done = ok(mpirun(most, Path(__file__).with_name("many_program.py"), json.dumps(asked), timeout=timeout, cwd=folder))
    return [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]


def steps(run: Path) -> list[dict[str, Any]]:
    """The training lines of metrics.jsonl."""
    return [line for line in lines(run) if "split" not in line]


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def record(run: Path) -> dict[str, Any]:
    about: dict[str, Any] = json.loads((run / "run.json").read_text())
    return about


TIMES = ("samples_per_s", "step_s", "comm_exposed_s", "comm_exposed_share", "seconds", "peak_rss_mb")


def without_times(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must repeat to the bit."""
    return [{name: value for name, value in line.items() if name not in TIMES} for line in metrics]


def refused(result: Result, status: int, *words: str) -> None:
    assert result.rc == status, result.out + result.err
    line, = result.error_lines
    for word in words:
        assert word in line, line


def ok(result: Result) -> Result:
    assert result.rc == 0 and result.error_lines == [], result.out + result.err
    return result


def batch(step: int) -> list[int]:
    """The rows of a step of the small run, counted from 1."""
    from mpitrain.data import Sampler
    from mpitrain.train.build.inputs import open_data
    return [int(row) for row in Sampler(open_data("digits").train_rows, 48, seed=0).rows(step - 1)]


def marks(path: Path, rows: list[int]) -> None:
    """Writes marks by which a model knows these rows of the small run: weighted sums of their pixels."""
    import numpy as np

    from mpitrain.train.build.inputs import open_data
    inputs = open_data("digits", transform=["standardise"])
    inputs.transforms.fit(inputs.training, inputs.train_rows)
    x = inputs.transforms(inputs.training.read(np.array(rows))[0]) if rows else np.zeros((0, 64), np.float32)
    np.save(path, np.round((x.reshape(len(x), 64) * np.arange(1, 65)).sum(axis=1) * 1e3).astype(int))
