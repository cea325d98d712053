"""Operations of files that are read when one is asked for, under our names and PyTorch's."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpitrain import Tensor, nn, ops
from mpitrain.nn.files import FILES as LAYERS
from mpitrain.ops import operators
from mpitrain.ops.files import FILES as OPS


def test_importing_the_operations_reads_none_of_the_later_files() -> None:
    program = ("import sys, mpitrain.ops as ops; from mpitrain.ops.files import FILES; "
               "read = lambda: [f for f in FILES if f'mpitrain.ops.{f}' in sys.modules]; before = read(); ops.arcsin(1.0); "
               "print(before, read())")
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[] ['unary']\n"


def test_the_map_of_later_files_is_what_they_offer() -> None:
    for package, files in ((ops, OPS), (nn, LAYERS)):
        folder = Path(package.__path__[0])
        for file in sorted(path.stem for path in folder.glob("[a-z]*.py")):
            module = importlib.import_module(f"{package.__name__}.{file}")
            listed = sorted(getattr(module, "__all__", ()))
            if file in files:
                assert sorted(files[file].split()) == listed, f"{folder.name}/files.py: {file} offers {' '.join(listed)}"
            else:
                assert all(name in vars(package) for name in listed), f"{folder.name}/__init__.py or files.py forgets {file}"



def test_no_file_has_the_name_of_an_operation() -> None:
    assert not [file for file in OPS if callable(getattr(ops, file, None))]


def test_every_method_is_an_operation() -> None:
    for name in operators.LATER.split():
        assert callable(getattr(ops, name)), name
    assert np.array_equal(Tensor(np.ones(2)).cos().array, np.cos(np.ones(2)))


def test_a_name_that_no_file_has_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'sine'"):
        getattr(ops, "sine")  # noqa: B009
