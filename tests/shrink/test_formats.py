"""Formats of weights: what is packed comes back, errors are those of rounding, and what has no whole numbers is refused."""

from __future__ import annotations

import numpy as np
import pytest
from fakegpu import counted, put
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpitrain.errors import NumericsError
from mpitrain.kernels.lowbit import GROUP, unpacked
from mpitrain.nn import LowBitEmbedding
from mpitrain.shrink.formats import FORMATS, pack

SIZES = [(0, 5), (1, 1), (3, 31), (65, 33), (2, 32), (7, 127)]


@given(hnp.arrays(np.int8, hnp.array_shapes(min_dims=1, max_dims=3, max_side=4).map(lambda shape: (*shape, GROUP)),
                  elements=st.integers(-8, 7)))
@settings(max_examples=50, deadline=None)
def test_nibbles_come_back(whole: np.ndarray) -> None:
    assert np.array_equal(unpacked(pack(whole)), whole)


def test_nibbles_lie_as_in_ggml() -> None:
    whole = np.arange(GROUP) % 16 - 8
    assert pack(whole).tolist() == [(i % 16) | (((i + 16) % 16) << 4) for i in range(16)]


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_arrays_are_as_described_and_errors_those_of_rounding(name: str, shape: tuple[int, int]) -> None:
    made, weight = FORMATS[name](), np.random.default_rng(0).normal(size=shape).astype(np.float32)
    arrays = made.quantize(weight)
    assert {key: (a.shape, a.dtype.name) for key, a in arrays.items()} == made.leaves(*shape)
    back = made.dequantize(arrays, shape[1])
    assert back.shape == shape and back.dtype == np.float32
    step = np.abs(weight).max(axis=1, keepdims=True, initial=0) / (127 if name == "int8" else 7)
    assert (np.abs(back - weight) <= 0.51 * step + 1e-6 if name == "int8" else np.abs(back - weight) <= 1.2 * step).all()


@given(hnp.arrays(np.float32, (3, 40), elements=st.floats(-2.0 ** 99, 2.0 ** 99, width=32)))
@settings(max_examples=50, deadline=None)
def test_int8_of_its_own_values_is_itself(weight: np.ndarray) -> None:
    made = FORMATS["int8"]()
    once = made.dequantize(made.quantize(weight), 40)
    again = made.dequantize(made.quantize(once), 40)
    assert np.allclose(once, again, rtol=1e-5, atol=1e-40)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1e-9, 1.0, 1e5])
def test_rows_of_zeros_and_of_extreme_sizes_are_finite(name: str, value: float) -> None:
    made, weight = FORMATS[name](), np.full((2, 33), value, np.float32)
    back = made.dequantize(made.quantize(weight), 33)
    assert np.isfinite(back).all() and (np.abs(back - weight) <= max(0.1 * value, 3e-8)).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(name: str, value: float) -> None:
    with pytest.raises(NumericsError, match="NaN or infinite"):
        FORMATS[name]().quantize(np.full((2, 33), value, np.float32))


def test_weights_beyond_the_scale_of_int4_are_refused() -> None:
    with pytest.raises(NumericsError, match="beyond float16"):
        FORMATS["int4"]().quantize(np.full((2, 33), 1e6, np.float32))


def test_int4_chooses_a_scale_no_worse_than_the_one_that_reaches_the_extreme() -> None:
    weight = np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)
    made = FORMATS["int4"]()
    found = ((made.dequantize(made.quantize(weight), 64) - weight) ** 2).sum()
    groups = weight.reshape(64, 2, GROUP)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(2)[..., None], 2) / -8
    plain = np.clip(np.rint(groups / extreme), -8, 7) * extreme
    assert found < 0.95 * ((plain - groups) ** 2).sum()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rows_of_a_table_on_a_device_are_those_of_the_host_without_a_wait(name: str) -> None:
    """And a row that is not there is no number: the device is not asked whether all are."""
    table = LowBitEmbedding(9, 40, FORMATS.resolve(name)())
    for leaf, array in table.format.quantize(np.random.default_rng(2).standard_normal((9, 40)).astype(np.float32)).items():
        getattr(table, leaf).array = array
    indices = np.array([[8, 0], [3, 3]])
    wanted = table(indices).array
    for leaf in table.names:
        getattr(table, leaf).array = put(getattr(table, leaf).array)
    there, beyond = put(indices), put(np.array([[8, 9], [-1, 3]]))
    with counted() as counts:
        found, missing = table(there).array, table(beyond).array
    assert not counts.syncs
    np.testing.assert_array_equal(found.get(), wanted)
    assert np.isnan(missing.get()).all(axis=-1).tolist() == [[False, True], [True, False]]
