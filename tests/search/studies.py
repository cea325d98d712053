"""What tests of whole studies share: a small study, and what it leaves."""

from __future__ import annotations

import json

from runs import DIGITS

HELD_OUT = DIGITS + 'validation = "tail:0.2"\n'
STUDY = HELD_OUT + """
[optimizer]
name = "sgd"
lr = 0.05
momentum = 0.9
schedule = "one_cycle"
[train]
epochs = 4
batch_size = 128
[search]
trials = 9
sampler = "random"
pruner = "asha"
eta = 3
rungs = [1, 2, 4]
order = "fixed"
objective = ["accuracy"]
[space]
"optimizer.lr" = {log = [3e-3, 0.3]}
"model.hidden" = {choices = [[16], [32], [16, 16]]}
"""
TIMES = ("seconds", "step_s", "samples_per_s", "comm_exposed_s", "comm_exposed_share", "peak_rss_mb")


def told(folder):
    """study.json of a study without its times, those of steps among them."""
    found = json.loads((folder / "study.json").read_text())
    del found["times"]
    for trial in (*found["trials"], found["best"]):
        for results in trial["results"].values():
            results.pop("ms", None)
    return found


def lines(folder):
    """metrics.jsonl of a run without its times."""
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES}
            for line in (folder / "metrics.jsonl").read_text().splitlines()]


def journal(folder):
    """The records of a study."""
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
