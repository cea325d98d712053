"""Files of installed packages that hold real data, for the `data.py` of an example: PyPI's packages and Debian's.

A package is looked up by what it says of itself and never imported, so that its own dependencies need not be there. A package
that is not there is a MissingError (exit status 66) whose line has the command that installs it; a file that is there but
damaged, or of a version that has it no more, is a DataError (65).
"""

from __future__ import annotations

import argparse
import base64
import functools
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mpitrain.data.storage import reading
from mpitrain.errors import DataError, MissingError, UsageError, print_warning

FOLDER = "MPITRAIN_DEBIAN"        # an environment variable: a folder that Debian packages were unpacked into


@dataclass(frozen=True)
class Packaged:
    """A file of a package. `cure` says what to do where its content is not what was expected; it ends an error's line."""

    path: Path
    cure: str

    def read(self) -> bytes:
        missing, denied, failed = f"the file is not there; {self.cure}", "no permission to read the file", "reading it failed"
        with reading(self.path, missing, denied, failed):
            return self.path.read_bytes()

    def error(self, message: str, *, dataset: str | None = None, row: int | None = None) -> DataError:
        return DataError(f"{message}; {self.cure}", file=self.path, dataset=dataset, row=row)


def python_package(name: str, version: str) -> importlib.metadata.Distribution:
    """What PyPI's package `name` says of itself. MissingError if it is not installed; `version` is the one to install."""
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise MissingError(f"the Python package {name} is not installed for {sys.executable}; {_pip(name, version)}") from None


def python_file(name: str, version: str, path: str) -> Packaged:
    """The file `path` ("ISLP/data/NYSE.csv") of PyPI's package `name`, compared with the SHA-256 that the package has of it.

    Another version than `version`, which the example was written for, will do while it has the file and what is read from it,
    and is told on stderr.
    """
    package = python_package(name, version)
    entry = next((file for file in package.files or () if file.as_posix() == path), None)
    if entry is None:
        raise DataError(f"{name} {package.version} has no file {path}, but {version} has; {_pip(name, version)}", dataset=path)
    cure = f"pip install --force-reinstall --no-deps {name}=={version}"
    if package.version != version:
        cure = f"{name} is {package.version}, and {version} was expected: {_pip(name, version)}"
    found = Packaged(Path(str(entry.locate())), cure)
    data = found.read()
    if entry.hash is not None and entry.hash.mode == "sha256":
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if digest != entry.hash.value:
            why = f"it has {len(data):,} of {entry.size:,} bytes" if entry.size not in (None, len(data)) else \
                "its SHA-256 is not the one that the package has of it"
            raise found.error(f"is not the file of {name} {package.version}: {why}")
    if package.version != version:
        _say_version(name, package.version, version)
    return found


@functools.cache                                   # once for all files
def _say_version(name: str, found: str, expected: str) -> None:
    print_warning(f"{name} is {found}, and the example was written for {expected}; its data and figures may be others")


def debian_file(name: str, path: str) -> Packaged:
    """The file `path` ("usr/share/...") of Debian's package `name`.

    It is looked for below the folder that $MPITRAIN_DEBIAN names, where that is set; else where Debian has it, and below
    `debian` in the Python environment, where ``make ready-examples`` unpacks packages.
    """
    own, unpacked = os.environ.get(FOLDER), Path(sys.prefix) / "debian"
    cures = {Path(own): f"unpack it again: dpkg -x {name}_*.deb {own}"} if own else {
        Path("/"): f"apt-get install --reinstall {name}", unpacked: f"unpack it again: rm -r {unpacked}; make ready-examples"}
    for root, cure in cures.items():
        if (root / path).exists():
            return Packaged(root / path, cure)
    nor = "" if own else f", nor {unpacked / path}"
    raise MissingError(f"this file of the Debian package {name} is not there{nor}; apt-get install {name}, or, without root: "
                       "make ready-examples", file=next(iter(cures)) / path)


def _pip(name: str, version: str) -> str:
    return f"pip install --no-deps {name}=={version}, or: make ready-examples"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours, one line each."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (try: {self.prog} --help)")


@dataclass(frozen=True)
class Output:
    """Where a `data.py` writes to: `folder`, and whether shards that are there may be replaced; `given` is what it reads."""

    folder: Path
    overwrite: bool
    given: Path | None = None


def output_of(script: str, about: str | None, arguments: Sequence[str] | None = None, *, takes: str = "") -> Output:
    """The command line of a `data.py`, ``[--out FOLDER] [--overwrite]``; by default, the folder `data` beside the script.

    A script whose data no package has takes a file as well: `takes` says which, and its path becomes `given`.
    """
    parser = _Parser(description=about)
    if takes:
        parser.add_argument("given", type=Path, metavar="FILE", help=takes)
    parser.add_argument("--out", type=Path, default=Path(script).resolve().parent / "data", metavar="FOLDER",
                        help="where shards are written (default: data, beside this file)")
    parser.add_argument("--overwrite", action="store_true", help="replace the shards that are in FOLDER")
    options = parser.parse_args(arguments)
    return Output(options.out, options.overwrite, options.given if takes else None)
