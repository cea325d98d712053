"""Whole runs that meet a damaged file, for damaged_files.py."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
from damage import DAMAGE, change
from data_inputs import features
from runs import record, train, write

from mpitrain.data import write_shards

ROWS = 64
CONFIG = """
[model]
name = "mlp"
inputs = 12
hidden = [16]
outputs = 10
[data]
path = "set"
[train]
steps = 4
batch_size = 16
[checkpoint]
every = 2
best = false
"""
MORE = ("train.steps=8", "--resume")


def damaged_runs(folder: Path, count: int, random_: random.Random) -> list[str]:
    """What is wrong with runs on two ranks that meet damage: a line names the file, or they have the same end."""
    wrong = list[str]()
    folder.mkdir()
    config = write(folder, CONFIG)
    write_shards(folder / "set", features(ROWS, 12), np.arange(ROWS) % 10, kind="classification")
    first = train(2, config, "run.out=begun")
    shutil.copytree(folder / "begun", folder / "whole")
    second = train(2, config, "run.out=whole", *MORE)
    assert (first.rc, second.rc) == (0, 0), first.err + second.err
    shards = [folder / "set/shard-00000.h5", folder / "set/manifest.json"]
    for i in range(count):
        run = folder / "damaged"
        shutil.copytree(folder / "begun", run)
        newest = run / "checkpoints/step-00000004"
        path = [*shards, newest / "part-00000.h5", newest / "manifest.json"][i % 4]
        whole, kind = path.read_bytes(), random_.choice([*DAMAGE])
        damaged = DAMAGE[kind](whole, (0, 0), random_)
        path.write_bytes(damaged)
        result = train(2, config, "run.out=damaged", *MORE)
        what = f"{path.name}, {kind}, {change(whole, damaged)}: exit {result.rc}\n{result.err}"
        if result.rc == 0 and record(run)["parameters_sha256"] != record(folder / "whole")["parameters_sha256"]:
            wrong.append(f"the run had another end: {what}")
        elif result.rc and (result.rc not in (65, 66) or len(result.error_lines) != 1 or "set/" not in result.error_lines[0]):
            wrong.append(what)
        if path in shards:
            path.write_bytes(whole)
        shutil.rmtree(run)
    print(f"{count} runs", flush=True)
    return wrong
