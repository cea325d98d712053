"""An installation that nobody may write to, used by a user without a home: caches go elsewhere, and serve the next start.

As root the user is `nobody`, since root may write anywhere; else it is whoever runs the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch import ROOT

from mpitrain.backend import native

NOBODY = 65534
needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C compiler")

NATIVE = """
from mpitrain.backend import cache, native
from mpitrain.kernels import KERNELS, rows
import numpy as np
seen = []
whole = native.compile_library
native.compile_library = lambda *given: (seen.append(given), whole(*given))
assert native.load("rows") is not None and native.missing() == {}, native.missing()
rows.softmax(np.ones((2, 3)))
print(*sorted(source.stem for source, *_ in seen), cache.cache_folder())
"""
NUMBA = """
from mpitrain.backend.cache import cache_folder
from mpitrain.kernels.kernel import prepare
prepare()
import numba.core.event as event
with event.install_recorder("numba:compile") as recorder:
    from mpitrain.kernels.random import random_words
    import numpy as np
    random_words(np.arange(2, dtype=np.uint64), 7, 5)
print(len([moment for moment, what in recorder.buffer if what.is_start]), cache_folder())
"""


@dataclass
class Installation:
    """A copy of the package that is read-only, a home that is too, and a folder for temporary files that is not."""

    folder: Path
    interpreter: str

    def run(self, *arguments: str, **changes: str) -> str:
        """What Python prints as the unprivileged user, who stands in the temporary folder."""
        return as_user([self.interpreter, *arguments], self.folder / "tmp", self.environment | changes)

    @property
    def environment(self) -> dict[str, str]:
        site, libraries = sysconfig.get_path("purelib"), str(Path(sys.prefix) / "lib")          # an MPI from PyPI lies there
        return {"PATH": os.environ["PATH"], "HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "tmp"),
                "PYTHONPATH": os.pathsep.join([str(self.folder / "install"), site]), "LD_LIBRARY_PATH": libraries}

    def files(self) -> set[str]:
        """Everything below what may not be written to."""
        return {str(path) for part in ("install", "home") for path in (self.folder / part).rglob("*")}


def as_user(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, **user)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def interpreter_for_anybody(environment: dict[str, str], folder: Path) -> str | None:
    """This one, or the system's of the same version: root's own lies where other users may not look."""
    for candidate in (sys.executable, f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"):
        try:
            as_user([candidate, "-c", "import numpy, mpitrain"], folder, environment)
        except (OSError, AssertionError):
            continue
        return candidate
    return None


@pytest.fixture
def installation() -> Iterator[Installation]:
    folder = Path(tempfile.mkdtemp(prefix="mpitrain-read-only-"))
    folder.chmod(0o755)
    for part in ("mpitrain", "native"):
        shutil.copytree(ROOT / part, folder / "install" / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "home").mkdir()
    (folder / "tmp").mkdir()
    for path in [*(folder / "install").rglob("*"), folder / "install", folder / "home"]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    (folder / "tmp").chmod(0o1777)
    made = Installation(folder, "")
    found = interpreter_for_anybody(made.environment, folder / "tmp")
    try:
        if found is None:
            pytest.skip("no interpreter with NumPy that an unprivileged user may run")
        made.interpreter = found
        yield made
    finally:
        for path in (folder / "install", folder / "home", *(p for p in (folder / "install").rglob("*") if p.is_dir())):
            path.chmod(0o755)
        shutil.rmtree(folder)


def user_id() -> int:
    return NOBODY if os.getuid() == 0 else os.getuid()


@needs_compiler
def test_native_code_is_compiled_once_into_a_folder_of_the_users_own(installation: Installation) -> None:
    before, cache = installation.files(), installation.folder / "tmp" / f"mpitrain-{user_id()}"
    assert installation.run("-c", NATIVE).split() == ["call", "rows", str(cache)]
    assert installation.run("-c", NATIVE).split() == [str(cache)]
    assert installation.files() == before and cache.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_numbas_code_is_compiled_once_into_a_folder_of_the_users_own(installation: Installation) -> None:
    before, cache = installation.files(), installation.folder / "tmp" / f"mpitrain-{user_id()}"
    first = installation.run("-c", NUMBA, PATH="/nonexistent").split()
    assert int(first[0]) > 0 and first[1] == str(cache)
    assert installation.run("-c", NUMBA, PATH="/nonexistent").split() == ["0", str(cache)]
    assert installation.files() == before and list(cache.rglob("*.nbi"))


@pytest.mark.slow
def test_a_run_trains(installation: Installation) -> None:
    before = installation.files()
    said = installation.run("-P", "-m", "mpitrain", "train", "train.steps=2", "log.every=1")
    assert "step 2/2" in said and (installation.folder / "tmp/runs").is_dir() and installation.files() == before
