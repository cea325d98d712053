"""docs/models.md has the models that there are, with the counts that other tests hold."""

from __future__ import annotations

from models_page import PAGE, with_tables


def test_the_tables_of_the_page_are_those_of_the_models() -> None:
    text = PAGE.read_text()
    assert text == with_tables(text), "run: python tests/models/models_page.py"
