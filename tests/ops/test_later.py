"""Operations of files that are read when one is asked for, under our names and PyTorch's."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from mpitrain import Tensor, ops
from mpitrain.ops import operators


def test_importing_the_operations_reads_none_of_the_later_files() -> None:
    program = ("import sys, mpitrain.ops as ops; before = [f for f in ops.LATER if f'mpitrain.ops.{f}' in sys.modules]; "
               "ops.sin(1.0); print(before, 'mpitrain.ops.unary' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[] True\n"



def test_no_file_has_the_name_of_an_operation() -> None:
    assert not [file for file in ops.LATER if callable(getattr(ops, file, None))]


def test_every_method_is_an_operation() -> None:
    for name in operators.LATER.split():
        assert callable(getattr(ops, name)), name
    assert np.array_equal(Tensor(np.ones(2)).cos().array, np.cos(np.ones(2)))


def test_a_name_that_no_file_has_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'sine'"):
        getattr(ops, "sine")  # noqa: B009
