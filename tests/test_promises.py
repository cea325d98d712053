"""docs/reliability.md lists what is promised and the tests that show it, as the marks in the tests say."""

from __future__ import annotations

from pathlib import Path

from promises import GROUPS, PAGE, PARTLY, PROMISES, Mark, marks, shown_by, written


def test_the_page_is_what_the_marks_make_of_it() -> None:
    assert PAGE.read_text() == written(PAGE.read_text(), list(marks())), "run make promises"


def test_every_mark_names_a_promise() -> None:
    assert [mark for mark in marks() if mark.promise not in PROMISES] == []
    assert {name[0] for name in PROMISES} == set(GROUPS) and set(PARTLY) <= set(PROMISES)


def test_a_mark_counts_on_a_test_and_on_one_of_its_parameters_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text('''
import pytest
@pytest.mark.promise("A1", "F2")
@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.promise("A4"))])
def test_one(x): pass
def test_two(): """pytest.mark.promise("B1")"""
@pytest.mark.promise("B2")
def no_test(): pass
''')
    file = tmp_path / "test_a.py"
    assert list(marks(tmp_path)) == [Mark("A1", file, "test_one"), Mark("F2", file, "test_one"), Mark("A4", file, "test_one")]


def test_what_no_test_shows_is_said() -> None:
    assert shown_by([]) == "not shown yet"
