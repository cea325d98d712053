"""Files of packages: found without an import, compared with what the package says of them, and each fault one line."""

from __future__ import annotations

import base64
import bz2
import gzip
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, clean_environment

from mpitrain.data import foreign, packages
from mpitrain.errors import DataError, MissingError, UsageError

TABLE = "day,volume\n1,0.5\n2,0.25\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on Python's path with the package Numbers 1.5, which would not import, and has one table."""
    folder = tmp_path / "site"
    write(folder, "numbers_/__init__.py", "raise ImportError")
    record = [f"{name},{digest},{size}" for name, digest, size in [write(folder, "numbers_/table.csv", TABLE)]]
    write(folder, "numbers_-1.5.dist-info/METADATA", "Name: numbers_\nVersion: 1.5\n")
    write(folder, "numbers_-1.5.dist-info/RECORD", "\n".join(record))
    monkeypatch.syspath_prepend(folder)
    return folder


def write(folder: Path, name: str, text: str) -> tuple[str, str, int]:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return name, "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode(), len(text)


def packaged(path: Path, content: bytes) -> packages.Packaged:
    path.write_bytes(content)
    return packages.Packaged(path, "install it again")


def test_a_file_of_a_python_package_is_found_without_importing_it(site: Path) -> None:
    file = packages.python_file("numbers_", "1.5", "numbers_/table.csv")
    assert file.path == site / "numbers_/table.csv"
    table = foreign.read_table(file, ["volume"])
    assert foreign.numbers(file, "volume", table["volume"]).tolist() == [0.5, 0.25]


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(MissingError, match="absent_package is not installed .* --no-deps absent_package==2.0, or: make"):
        packages.python_file("absent_package", "2.0", "a.csv")


def test_a_version_without_the_file_names_both_versions(site: Path) -> None:
    with pytest.raises(DataError, match="numbers_ 1.5 has no file numbers_/other.csv, but 2.0 has; pip install .*==2.0"):
        packages.python_file("numbers_", "2.0", "numbers_/other.csv")


def test_a_version_without_a_column_names_the_column_and_the_version_to_install(site: Path) -> None:
    file = packages.python_file("numbers_", "2.0", "numbers_/table.csv")
    with pytest.raises(DataError, match='no column "price" .there: day, volume.; numbers_ is 1.5, .*_==2.0') as found:
        foreign.read_table(file, ["day", "price"])
    assert found.value.dataset == "price"


def test_another_version_than_the_one_that_was_expected_is_told_once(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packages._say_version.cache_clear()
    packages.python_file("numbers_", "1.5", "numbers_/table.csv")
    assert capsys.readouterr().err == ""
    for _ in range(2):
        packages.python_file("numbers_", "2.0", "numbers_/table.csv")
    line, = capsys.readouterr().err.splitlines()
    assert line == "warning: numbers_ is 1.5, and the example was written for 2.0; its data and figures may be others"


@pytest.mark.parametrize(("content", "why"), [
    (TABLE[:-5], "it has 19 of 24 bytes"), ("", "it has 0 of 24 bytes"),
    (TABLE.replace("5", "6"), "its SHA-256 is not the one that the package has of it")])
def test_a_file_that_is_not_the_one_of_the_package_is_refused(site: Path, content: str, why: str) -> None:
    (site / "numbers_/table.csv").write_text(content)
    with pytest.raises(DataError, match=f"is not the file of numbers_ 1.5: {why}; pip install --force-reinstall .*_==1.5"):
        packages.python_file("numbers_", "1.5", "numbers_/table.csv")


def test_a_file_that_is_gone_from_its_package_is_missing(site: Path) -> None:
    (site / "numbers_/table.csv").unlink()
    with pytest.raises(MissingError, match="pip install --force-reinstall"):
        packages.python_file("numbers_", "1.5", "numbers_/table.csv")


def test_a_debian_package_is_looked_for_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(packages.FOLDER, str(tmp_path))
    with pytest.raises(MissingError, match="apt-get install some-data, or, without root: make ready-examples") as found:
        packages.debian_file("some-data", "usr/share/some/data.csv")
    assert found.value.file == str(tmp_path / "usr/share/some/data.csv") and found.value.exit_code == 66
    write(tmp_path, "usr/share/some/data.csv", TABLE)
    assert packages.debian_file("some-data", "usr/share/some/data.csv").read() == TABLE.encode()


def test_what_is_said_of_a_damaged_file_of_debian_fits_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make ready-examples` leaves what it has unpacked, and apt-get does not know of it."""
    write(tmp_path / "debian", "usr/share/some/data.csv", TABLE)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv(packages.FOLDER, raising=False)
    file = packages.debian_file("some-data", "usr/share/some/data.csv")
    assert str(file.error("is damaged")).endswith(f"is damaged; unpack it again: rm -r {tmp_path}/debian; make ready-examples")
    monkeypatch.setenv(packages.FOLDER, str(tmp_path / "debian"))
    file = packages.debian_file("some-data", "usr/share/some/data.csv")
    assert file.cure == f"unpack it again: dpkg -x some-data_*.deb {tmp_path}/debian"


@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.csv.gz", gzip.compress(TABLE.encode(), mtime=0)[:-9], "is not a complete gzip file"),
    ("a.csv", b"day\xff,volume\n1,2\n", "byte 3 is not UTF-8"),
    ("a.csv", b"day,volume\n1,2\n3\n", "1 columns, but the header line has 2"),
    ("a.csv", b"day,volume\n", "the table is empty"),
    ("a.csv", b'day,volume\n1,"2\n3,4\n', "is not a table: unexpected end of data"),
    ("a.csv", b"day,volume,day\n1,2,3\n", '2 columns are named "day"'),
])
def test_a_damaged_table_is_one_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=f"{said}.*; install it again"):
        foreign.read_table(packaged(tmp_path / name, content))


def test_cells_that_are_no_numbers_or_no_classes_are_named_with_their_row(tmp_path: Path) -> None:
    file = packaged(tmp_path / "a.csv", b"")
    for cell in ("x", "nan", "inf", "", None):     # a data frame has None where R has NA
        with pytest.raises(DataError, match="is not a finite number") as found:
            foreign.numbers(file, "a", ["1", cell])
        assert found.value.row == 1
    assert foreign.labels(file, "a", ["n", "ei"], ["ei", "ie", "n"]).tolist() == [2, 0]
    with pytest.raises(DataError, match='"no" in column "a" is none of yes') as found:
        foreign.labels(file, "a", ["yes", "no"], ["yes"])
    assert found.value.row == 1


SERIES = b"# made up\n@problemName Two\n@seriesLength 3\n@classLabel true 1 2\n@data\n1,2,3:1\n4,5,6.5:2\n"


def test_series_are_read_with_the_names_of_their_classes(tmp_path: Path) -> None:
    values, names, classes = foreign.read_series(packaged(tmp_path / "a.ts", SERIES))
    assert values.tolist() == [[1, 2, 3], [4, 5, 6.5]] and names == classes == ["1", "2"]
    unlisted = SERIES.replace(b"@classLabel true 1 2\n", b"").replace(b":1", b":z").replace(b":2", b":b")
    assert foreign.read_series(packaged(tmp_path / "b.ts", unlisted))[1:] == (["z", "b"], ["b", "z"])


@pytest.mark.parametrize(("content", "said"), [(SERIES[:-3], "of one variable"), (SERIES[:-7] + b":1\n", "2 values, and 3 were"),
                                               (SERIES[:40], "no line @data"),
                                               (SERIES.replace(b"@s", b"@ s")[:-3], "of one variable"),
                                               (SERIES[:72], "no line @data|of one variable"),
                                               (SERIES.replace(b"6.5", b"?"), "not a finite number")])
def test_a_damaged_file_of_series_is_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        foreign.read_series(packaged(tmp_path / "a.ts", content))


@pytest.mark.parametrize("content", [b"", b"RDX3\nX\n", bz2.compress(b"RDX2\nX\n"), bz2.compress(b"RDX2\nX\n\0\0\0\2" * 4)[:-9]])
def test_a_damaged_rda_is_one_line(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("rdata", reason="the Python package rdata is not installed: make ready-examples")
    with pytest.raises(DataError, match="cannot be read as R's .rda: .*; install it again"):
        foreign.read_frame(packaged(tmp_path / "a.rda", content), "a")


def test_the_command_line_of_a_data_script(tmp_path: Path) -> None:
    script = str(tmp_path / "data.py")
    assert packages.output_of(script, "", []) == packages.Output(tmp_path / "data", False)
    assert packages.output_of(script, "", ["--out", "x", "--overwrite"]) == packages.Output(Path("x"), True)
    assert packages.output_of(script, "", ["a.txt"], takes="a text") == packages.Output(tmp_path / "data", False, Path("a.txt"))
    with pytest.raises(UsageError, match="the following arguments are required: FILE"):
        packages.output_of(script, "", [], takes="a text")
    with pytest.raises(UsageError, match="unrecognized arguments: more"):
        packages.output_of(script, "", ["more"])


def script(name: str, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / f"examples/{name}/data.py", *map(str, arguments)]
    return subprocess.run(command, text=True, capture_output=True, env={**clean_environment(), packages.FOLDER: str(folder)})


def test_a_script_ends_with_one_line_and_its_status(tmp_path: Path) -> None:
    out = tmp_path / "out"
    missing = script("fashion", tmp_path, "--out", out)
    assert missing.returncode == 66 and missing.stderr.count("\n") == 1
    assert "apt-get install dataset-fashion-mnist" in missing.stderr
    for part in ("train-images-idx3", "train-labels-idx1"):
        path = tmp_path / f"usr/share/datasets/fashion-mnist/{part}-ubyte.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(bytes(1000))[:-10])
    damaged = script("fashion", tmp_path, "--out", out)
    assert damaged.returncode == 65 and damaged.stderr.count("\n") == 1 and "is not a complete gzip file" in damaged.stderr
    assert f"unpack it again: dpkg -x dataset-fashion-mnist_*.deb {tmp_path}" in damaged.stderr
    assert not out.exists()
