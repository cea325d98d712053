"""Every worked example has its parts, and a configuration that `inspect` takes once data of its kind is there."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import examples  # noqa: E402
from mpitrain.config import load_config  # noqa: E402
from mpitrain.config.rules import check  # noqa: E402
from mpitrain.data import packages  # noqa: E402
from mpitrain.errors import DataError, MissingError  # noqa: E402
from mpitrain.schedules.grid import Grid  # noqa: E402

FOLDERS = sorted(path.parent for path in (ROOT / "examples").glob("*/data.py"))
OF_PACKAGES = [folder for folder in FOLDERS if re.search(r"(python|debian)_file\(", (folder / "data.py").read_text())]


def test_there_are_examples() -> None:
    assert FOLDERS and {path.name for path in FOLDERS} == {figure.example for figure in examples.figures()}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_example_has_a_page_and_configurations_that_hold(folder: Path) -> None:
    page = (folder / "README.md").read_text()
    assert 15 <= len(page.splitlines()) <= 100 and "data.py" in page
    assert (ROOT / "examples/README.md").read_text().count(f"]({folder.name}/README.md)") == 1, "the index has a line of each"
    configs = sorted(folder.glob("*.toml"))
    configs.remove(folder / "figure.toml")
    assert configs and {figure.config for figure in examples.figures([folder.name])} <= {path.name for path in configs}
    for path in configs:
        assert path.name in page
        config = load_config(path, [])
        for ranks in (1, 2):
            check(config, Grid({"dp": ranks}), on_gpu=False)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_page_writes_only_where_git_does_not_look(folder: Path) -> None:
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.startswith("/")]
    for path in re.findall(r"^(?:python|mpirun)\b.*(?:--out |run\.out=)(\S+)", (folder / "README.md").read_text(), re.MULTILINE):
        assert path.partition("/")[0] in ignored, path


def test_data_that_failed_half_way_are_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`data.py` of a made-up example writes half of its data and fails, and where that is there already, it fails too."""
    own = tmp_path / "examples/own"
    own.mkdir(parents=True)
    (own / "figure.toml").write_text('[[run]]\nconfig = "run.toml"\nmetric = "accuracy"\nat_least = 0.5\npublished = ""\n')
    (own / "data.py").write_text("from pathlib import Path\nhere = Path(__file__).parent\n(here / 'half').mkdir()\n"
                                 f"assert Path({str(tmp_path / 'there')!r}).exists(), 'not there yet'\n")
    monkeypatch.setattr(examples, "EXAMPLES", tmp_path / "examples")
    figure, = examples.figures()
    work = tmp_path / "work"
    work.mkdir()
    assert examples.prepare(figure, work) == examples.prepare(figure, work) == (1, "AssertionError: not there yet")
    (tmp_path / "there").touch()
    assert examples.prepare(figure, work) == (0, "") and (work / "own/half").is_dir()
    (tmp_path / "there").unlink()
    assert examples.prepare(figure, work) == (0, "")                           # made once


@pytest.mark.parametrize("folder", OF_PACKAGES, ids=lambda folder: folder.name)
def test_without_its_package_an_example_says_what_to_get(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)
    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    monkeypatch.setenv(packages.FOLDER, str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["data.py", "--out", str(tmp_path / "out")])
    with pytest.raises(MissingError, match="apt-get install|pip install") as found:
        runpy.run_path(str(folder / "data.py"))["main"]()
    assert found.value.exit_code == 66 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("folder", OF_PACKAGES, ids=lambda folder: folder.name)
def test_a_truncated_file_of_its_package_is_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of PyPI differs from its SHA-256; Debian's files have none where they lie, and cannot be unpacked."""
    whole, of_debian = packages.Packaged.read, packages.debian_file

    def halved(name: str, path: str) -> packages.Packaged:
        found = of_debian(name, path)
        for part in (found.path, found.path.with_suffix(".rdx")):              # R's pairs of files lie side by side
            if part.exists():
                (tmp_path / part.name).write_bytes(part.read_bytes()[:part.stat().st_size // 2])
        return packages.Packaged(tmp_path / found.path.name, found.cure)
    monkeypatch.setattr(packages, "debian_file", halved)
    if "python_file(" in (folder / "data.py").read_text():
        monkeypatch.setattr(packages.Packaged, "read", lambda file: whole(file)[:len(whole(file)) // 2])
    monkeypatch.setattr(sys, "argv", ["data.py", "--out", str(tmp_path / "out")])
    try:
        with pytest.raises(DataError) as found:
            runpy.run_path(str(folder / "data.py"))["main"]()
    except MissingError as error:
        pytest.skip(error.message)
    said = str(found.value)
    assert found.value.exit_code == 65 and "\n" not in said and not (tmp_path / "out").exists()
    assert re.search(r"pip install --force-reinstall|apt-get install --reinstall|unpack it again: (dpkg -x|rm -r) ", said), said


def test_the_index_has_a_line_for_each_folder_and_for_no_other() -> None:
    index = (ROOT / "examples/README.md").read_text()
    assert re.findall(r"^\| \[(\w+)\]\((\w+)/README\.md\) \|", index, re.MULTILINE) == [(path.name,) * 2 for path in FOLDERS]
    others = {path.parent.name for path in (ROOT / "examples").glob("*/*") if path.parent.name != "slurm"}
    assert others == {path.name for path in FOLDERS}, "a folder without data.py is in no test"
