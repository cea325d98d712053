"""Every kernel that has a device version: that version, run on the CPU, against the plain-array expression that defines it.

The same source is device code elsewhere (tests/kernels/test_cubins.py). Sizes are odd; what a kernel should write is NaN before;
arguments are those of `kernel_examples`, in four formats.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pkgutil
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from device_on_host import compiler
from fakegpu import DEVICES, open_device, put, xp
from kernel_examples import DEVICE_EXAMPLES, EXAMPLES, Example

import mpitrain.kernels
from mpitrain.backend.namespace import is_array
from mpitrain.kernels import KERNELS
from mpitrain.kernels.device import FILES, version_of
from mpitrain.kernels.pointwise import ACTIVATIONS
from mpitrain.kernels.sums import column_sums

for module in pkgutil.iter_modules(mpitrain.kernels.__path__):
    importlib.import_module(f"mpitrain.kernels.{module.name}")

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
DTYPES = {"float32": np.dtype("float32"), "float64": np.dtype("float64"), "float16": np.dtype("float16"),
          "bfloat16": np.dtype(ml_dtypes.bfloat16)}
LEAST = {"float32": 3e-6, "float64": 1e-13, "float16": 4e-3, "bfloat16": 3e-2}          # relative to the largest of a result
CASES = [(name, dtype, i) for name in sorted(FILES) for i, example in enumerate([EXAMPLES[name], *DEVICE_EXAMPLES.get(name, ())])
         for dtype in (DTYPES if "float32" in example.dtypes else example.dtypes)]


def loss_alone(logits: Any, *arguments: Any, run: Any) -> Any:
    return run("cross_entropy")(logits, *arguments)[0]


def forward_and_gradient(logits: Any, labels: Any, _: Any, smoothing: float, ignore: int | None, grad: Any, *, run: Any) -> Any:
    _, kept, totals = run("cross_entropy")(logits, labels, smoothing, ignore, True)
    return run("cross_entropy_grad")(kept, labels, totals, smoothing, ignore, grad, False)


# What cross-entropy keeps for its gradient is another thing on a device: that is tried by the gradient that comes of it.
COMPOSED = {"cross_entropy": loss_alone, "cross_entropy_grad": forward_and_gradient}


def example_of(name: str, i: int) -> Example:
    return [EXAMPLES[name], *DEVICE_EXAMPLES.get(name, ())][i]


def moved(value: Any, change: Any) -> Any:
    """Arguments or results with `change` made to their arrays, those within tuples, lists and dataclasses too."""
    if is_array(value):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for name, part in vars(value).items():
            object.__setattr__(made, name, moved(part, change))
        return made
    if isinstance(value, tuple | list):
        parts = [moved(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def arrays_of(value: Any) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    moved(value, found.append)
    return found


def as_dtype(dtype: np.dtype[Any]) -> Any:
    most = 200.0 if dtype == "float16" else np.inf            # squares of what float16 holds are beyond it

    def change(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x.clip(-most, most)) if x.dtype.kind == "f" else x
        return x.astype(dtype) if x.dtype.kind in "fV" else x
    return change


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "dtype", "i"), CASES)
def test_a_device_version_equals_the_reference(name: str, dtype: str, i: int, device: str) -> None:
    _, move, _ = open_device(device)
    kernel, version, example = KERNELS[name], version_of(name), example_of(name, i)
    assert version is not None
    made_in = dtype if dtype in example.dtypes else "float32"
    arguments = example.arguments(np.random.default_rng(1), np.dtype(made_in))
    with np.errstate(invalid="ignore", over="ignore"):             # in memory of np.empty that is yet to be written, all may be
        arguments = moved(arguments, as_dtype(DTYPES[dtype]))
        given = moved(copy.deepcopy(arguments), move)
        expected = moved(copy.deepcopy(arguments), as_dtype(np.dtype("float64")))
    function, defined = version, kernel.reference
    if name in COMPOSED:
        function = partial(COMPOSED[name], run=version_of)
        defined = partial(COMPOSED[name], run=lambda other: KERNELS[other].reference)
    found, wanted = function(*given), defined(*expected)
    tolerance = max(LEAST[dtype], example.tolerance * (1e-6 if dtype == "float64" else 1))
    back = [moved(part, lambda x: x.get() if not isinstance(x, np.ndarray) else x) for part in (found, given)]
    for made, right in zip([*arrays_of(back[0]), *arrays_of(back[1])], [*arrays_of(wanted), *arrays_of(expected)], strict=True):
        assert made.shape == right.shape
        if right.size and right.dtype.kind == "f":
            made = made.astype("float64")
            with np.errstate(over="ignore"):                       # float16 has no numbers beyond 65504
                right = right.astype("float16" if dtype == "float16" else "float64").astype("float64")
            finite = np.isfinite(right)
            np.testing.assert_array_equal(made[~finite], right[~finite])
            scale = float(np.abs(right[finite]).max(initial=0)) or 1.0
            assert float(np.abs(made[finite] - right[finite]).max(initial=0)) <= tolerance * scale
        else:
            np.testing.assert_array_equal(made, right)


def test_a_kernel_without_a_device_version_runs_as_expressions_and_so_do_integers() -> None:
    assert KERNELS["relu"](put(np.array([-1, 2]))).get().tolist() == [0, 2]


def test_the_door_refuses_what_a_kernel_would_misread() -> None:
    from mpitrain.kernels.device.pointwise import SOURCE
    run = SOURCE.function("relu", "X:n X!:n in")
    x, y = put(np.ones(5, "float32")), put(np.ones(5, "float32"))
    for arguments, said in [((x, y, 6), "has 5 numbers"), ((x, put(np.ones(5)), 5), "is float64, expected float32"),
                            ((put(np.ones((5, 2), "float32"))[:, 0], y, 5), "gaps"), ((x, np.ones(5), 5), "array of numpy"),
                            ((x, y), "called with 2 arguments"), ((put(np.ones(5, "int32")), y, 5), "is int32"),
                            ((x, 3, 5), "is int")]:
        with pytest.raises(TypeError, match=said):
            run((1,), 256, *arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_that_begin_anywhere_are_those_of_aligned_memory(dtype: str) -> None:
    """16 bytes are loaded at once where that is allowed: the stand-in would end at an address that is not one of 16 bytes."""
    x, grad = (np.random.default_rng(i).standard_normal((19, 264)).astype(DTYPES[dtype]) for i in (1, 2))
    gelu = ACTIVATIONS["gelu"]
    found = []
    for first in (0, 1):
        moved_on = [xp.empty(x.size + first, x.dtype)[first:].reshape(x.shape) for _ in range(2)]
        moved_on[0][...], moved_on[1][...] = put(x), put(grad)
        made, kept = gelu.forward(moved_on[0], ours=False, training=True)
        sums = xp.empty(264, "float32")
        found.append([made, gelu.gradient(kept, moved_on[1], sums), column_sums(moved_on[1], xp.empty(264, "float32"))])
        wanted = found[-1][1].get().astype("float64").sum(axis=0)             # of numbers that are rounded once more
        np.testing.assert_allclose(sums.get(), wanted, atol=1e-5 if dtype == "float32" else 0.1)
    for aligned, anywhere in zip(*found, strict=True):
        np.testing.assert_allclose(aligned.get().astype("float64"), anywhere.get().astype("float64"), rtol=1e-5, atol=1e-5)


def test_sums_are_of_more_rows_than_a_grid_has_blocks_in_its_second_size() -> None:
    """65,535 at most, of 64 rows each: the stand-in launches no larger ones, as a GPU."""
    rows = 65535 * 64 + 1
    x, found = put(np.ones((rows, 1), np.float32)), xp.empty(1, np.float32)
    assert column_sums(x, found).get() == rows
    relu = ACTIVATIONS["relu"]
    relu.gradient(x, x, found)
    assert found.get() == rows
