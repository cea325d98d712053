"""A character-level LSTM through `mpitrain train`, with dropout between its layers: one set of bits on any ranks."""

from __future__ import annotations

from pathlib import Path

from runs import ok, record, steps, write
from standing import train

from mpitrain.data.importers import import_text

MODEL = """
from mpitrain import nn


class Characters(nn.Module):
    def __init__(self, vocabulary, width):
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0])


def net(block, vocabulary, width):
    return Characters(vocabulary, width)
"""

CONFIG = """
[model]
name = "mine.py:net"
block = 24
vocabulary = 256
width = 48
[data]
path = "text"
validation = "tail:0.1"
[optimizer]
name = "adamw"
lr = 1e-2
schedule = "constant"
[train]
steps = 25
batch_size = 24
reproducible = "layout"
micro_batches = 6
[log]
every = 1
"""


def test_an_lstm_of_characters_learns_with_the_same_bits_on_one_and_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "corpus.txt").write_text("how much wood would a woodchuck chuck if a woodchuck could chuck wood? " * 60)
    import_text(tmp_path / "corpus.txt", tmp_path / "text", level="byte")
    config = write(tmp_path, CONFIG)
    for n in (1, 2):
        ok(train(n, config, f"run.out=on{n}"))
    losses = [[step["loss"] for step in steps(tmp_path / f"on{n}")] for n in (1, 2)]
    assert losses[0] == losses[1] and losses[0][-1] < 2.5 < 5 < losses[0][0]
    assert record(tmp_path / "on1")["parameters_sha256"] == record(tmp_path / "on2")["parameters_sha256"]
