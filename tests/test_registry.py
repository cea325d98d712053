"""What a name in a configuration stands for, and what is said about one that stands for nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.errors import ConfigError
from mpitrain.registry import Registry, import_object

MODULE = """
from __future__ import annotations
import math
import networks_of_others
from functools import partial
from pathlib import Path
from typing import Any

WIDTH = 3

def network(classes: int) -> Any:
    return None

class Wide:
    pass

small = partial(network, classes=2)

def _helper():
    return None
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(MODULE)
    (tmp_path / "networks_of_others.py").write_text("")
    return tmp_path


def refusal(name: str, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        import_object(name, "model", folder)
    return caught.value.message


@pytest.fixture(autouse=True)
def beside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))


def test_the_list_of_a_module_holds_what_it_made_and_nothing_it_imported(folder: Path) -> None:
    assert refusal("nets.py:xyz", folder) == 'model "nets.py:xyz": nets.py has no "xyz" (known: Wide, network, small)'


@pytest.mark.parametrize("near", ["maths", "paths", "partials", "annotation", "networks_of_other"])
def test_an_import_is_never_suggested(folder: Path, near: str) -> None:
    assert refusal(f"nets.py:{near}", folder).endswith(("(known: Wide, network, small)", '(did you mean "network"?)'))


def test_a_name_of_its_own_is_suggested(folder: Path) -> None:
    assert refusal("nets.py:netwrok", folder).endswith('(did you mean "network"?)')


def test_what_a_package_offers_in_all_counts_wherever_it_was_made(folder: Path) -> None:
    (folder / "offering").mkdir()
    (folder / "offering" / "__init__.py").write_text("from nets import network, Wide\n__all__ = ['network', 'gone']\n")
    assert refusal("offering:xyz", folder) == 'model "offering:xyz": offering has no "xyz" (known: network)'
    assert import_object("offering:Wide", "model", folder).__name__ == "Wide"        # only the list is short


@pytest.mark.parametrize("everything", ["5", "['network', 5]"])
def test_an_all_that_is_no_list_of_names_does_not_hide_the_message(folder: Path, everything: str) -> None:
    (folder / "odd.py").write_text(f"def network(): pass\n__all__ = {everything}\n")
    assert refusal("odd.py:netwrok", folder).endswith('odd.py has no "netwrok" (did you mean "network"?)')


def test_a_long_list_is_cut_off() -> None:
    assert refusal("os:nothing", Path()).count(", ") == 12 and refusal("os:nothing", Path()).endswith(", ...)")


def test_the_list_of_a_registry_is_what_was_registered() -> None:
    registry: Registry[int] = Registry("number")
    registry.register("one")(1)
    registry.register("two")(2)
    for name, end in (("three", ' (known: one, two); your own is "package.module:name" or "file.py:name"'),
                      ("onee", '(did you mean "one"?); your own is "package.module:name" or "file.py:name"')):
        with pytest.raises(ConfigError) as caught:
            registry.resolve(name)
        assert caught.value.message.startswith(f'unknown number "{name}"') and caught.value.message.endswith(end)


def test_what_is_registered_by_its_place_is_imported_when_somebody_asks_for_it(folder: Path) -> None:
    (folder / "seldom.py").write_text("one = 1\n")
    registry: Registry[int] = Registry("number")
    registry.register_later("one", "seldom:one")
    assert "one" in registry and [*registry] == ["one"] and "seldom" not in sys.modules
    assert registry.resolve("one") == registry["one"] == 1 and [*registry] == ["one"]


def test_a_file_that_was_edited_is_loaded_again_and_another_one_is_not(folder: Path) -> None:
    path = folder / "mine.py"
    path.write_text("def network(): return 1\n")
    first = import_object("mine.py:network", "model", folder)
    assert import_object("mine.py:network", "model", folder) is first and first() == 1
    path.write_text("def network(): return 2\n")                # in the same second, and of the same size
    assert import_object("mine.py:network", "model", folder)() == 2
    path.write_text("def network(: return 3\n")
    assert "importing it failed: SyntaxError" in refusal("mine.py:network", folder)
    path.write_text("def network(): return 4\n")
    assert import_object("mine.py:network", "model", folder)() == 4


def test_a_file_imports_the_one_beside_it_and_has_one_name_in_all_processes(folder: Path) -> None:
    (folder / "sizes_beside.py").write_text("WIDTH = 3\n")
    (folder / "mine.py").write_text("import sizes_beside\ndef network(): return sizes_beside.WIDTH, __name__\n")
    asks = "import pathlib, sys; from mpitrain.registry import import_object as find; " \
           "print(find('mine.py:network', 'model', pathlib.Path(sys.argv[1]))())"
    told = {subprocess.check_output([sys.executable, "-P", "-c", asks, str(folder)], text=True,
                                    env={**os.environ, "PYTHONHASHSEED": seed}) for seed in ("1", "2")}
    assert len(told) == 1 and next(iter(told)).startswith("(3, 'mpitrain_user_")
