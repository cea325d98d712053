"""Pages have the models that there are, with the counts that other tests hold, or that are counted here."""

from __future__ import annotations

import re

import numpy as np
from models_page import PAGE, with_tables

from mpitrain.models import MODELS
from mpitrain.plan.flops import count

SIZES = re.compile(r"^\| `(\w+)` \| \(([\d, ]+)\) \| ([\d.]+) \| ([\d.]+) \|", re.MULTILINE)


def test_the_tables_of_the_page_are_those_of_the_models() -> None:
    text = PAGE.read_text()
    assert text == with_tables(text), "run: python tests/models/models_page.py"


def test_the_sizes_on_the_page_of_images_are_counted() -> None:
    """Parameters in millions, multiply-adds in 1e9, to the digits that are written."""
    rows = SIZES.findall(PAGE.with_name("images.md").read_text())
    assert len(rows) == 6
    for name, shape, parameters, work in rows:
        model = MODELS[name]()
        found = count(model, np.zeros((1, *map(int, shape.split(","))), np.float32)).forward / 1e9
        for said, value in ((parameters, model.count_parameters() / 1e6), (work, found)):
            assert f"{value:.{len(said.partition('.')[2])}f}" == said, (name, said, value)
