"""Flat storage: layout, injected memory, and initial values that depend on (seed, name, element) alone."""

import tracemalloc

import numpy as np
import pytest

from mpitrain.backend import stream_key
from mpitrain.errors import ConfigError, GraphError, ShapeError
from mpitrain.kernels import random
from mpitrain.nn import Embedding, FlatStorage, Linear, Module, Parameter, Sequential, init
from mpitrain.nn.parameter import CHUNK
from mpitrain.optim import SGD


def small():
    return Sequential(("a", Linear(3, 5)), ("b", Linear(5, 2)))


def parameter(name, shape, initial):
    p = Parameter(shape, initial)
    p.name = name
    return p


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_parameters_are_aligned_views_in_order_and_the_gaps_are_zero(dtype):
    model = small()
    storage = model.initialize(dtype=dtype)
    assert [(s.name, s.start, s.stop) for s in storage.segments] == [
        ("a.weight", 0, 15), ("a.bias", 16, 21), ("b.weight", 32, 42), ("b.bias", 48, 50)]
    assert storage.values.shape == (64,) and storage.values.dtype == dtype
    covered = np.zeros(64, bool)
    for segment, view in zip(storage.segments, storage.views(storage.values)):
        assert segment.parameter.array.ctypes.data % 64 == 0
        assert np.shares_memory(segment.parameter.array, storage.values) and view.shape == segment.shape
        covered[segment.start:segment.stop] = True
    assert (storage.values[covered] != 0).all() and (storage.values[~covered] == 0).all()


def test_memory_can_be_injected():
    asked = []

    def allocate(nbytes):
        asked.append(nbytes)
        raw = np.full(nbytes + 64, 255, np.uint8)
        shift = -raw.ctypes.data % 64
        return memoryview(raw[shift:shift + nbytes + (64 - shift)])
    model, plain = small(), small()
    storage = model.initialize(seed=5, allocate=allocate)
    assert asked == [64 * 4]
    np.testing.assert_array_equal(storage.values, plain.initialize(seed=5).values)       # gaps included
    assert (storage.new_flat(allocate) == 0).all() and len(asked) == 2
    optimizer = SGD(model, 0.1, momentum=0.9, allocate=allocate)
    assert len(asked) == 3 and (optimizer.state["momentum"] == 0).all()


def test_memory_that_is_too_small_or_crooked_is_refused():
    with pytest.raises(ShapeError, match="need 256 bytes, allocate\\(\\) gave 10"):
        small().initialize(allocate=lambda nbytes: np.zeros(10, np.uint8))
    raw = np.zeros(400, np.uint8)
    shift = -raw.ctypes.data % 64 + 4
    with pytest.raises(ShapeError, match="not a multiple of 64"):
        small().initialize(allocate=lambda nbytes: raw[shift:shift + nbytes])


def test_describing_a_huge_model_allocates_nothing():
    tracemalloc.start()
    try:
        model = Sequential(*((f"block{i}", Linear(100_000, 100_000)) for i in range(50)))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert model.count_parameters() == 50 * (10**10 + 10**5)
    assert used < 1_000_000
    assert not any(p.allocated for p in model.parameters())


def test_initial_values_do_not_depend_on_the_order_of_allocation():
    class Turned(Module):
        def __init__(self):
            self.b = Linear(5, 2)
            self.a = Linear(3, 5)
    one, two = small(), Turned()
    one.initialize(seed=9)
    two.initialize(seed=9)
    for name, value in one.state_dict().items():
        np.testing.assert_array_equal(value, two.state_dict()[name])


def test_equal_layers_start_different_and_seeds_matter():
    model = Sequential(Linear(4, 4), Linear(4, 4))
    model.initialize(seed=0)
    first = model[0].weight.array.copy()
    assert not (first == model[1].weight.array).any()
    model.initialize(seed=1)
    assert not (first == model[0].weight.array).any()


def test_values_are_those_of_the_stream_named_by_seed_and_parameter():
    model = Sequential(("x", Embedding(100, 1000)))
    model.initialize(seed=4, dtype="float64")
    assert model.parameters()[0].size > CHUNK
    expected = random.normal(stream_key(4, "x.weight"), 0, 100_000, np)
    np.testing.assert_array_equal(model["x"].weight.array.ravel(), expected)


@pytest.mark.parametrize(("dim", "start", "stop"), [(0, 1, 3), (1, 2, 5), (2, 0, 1), (2, 3, 3)])
def test_a_parameter_cut_for_a_mesh_axis_holds_the_values_of_the_whole(dim, start, stop):
    whole = parameter("w", (4, 6, 4), init.kaiming_normal())
    FlatStorage([whole], "float64").initialise(8)
    part = parameter("w", (4, 6, 4), init.kaiming_normal())
    part.narrow("tp", dim, start, stop)
    FlatStorage([part], "float64").initialise(8)
    index = [slice(None)] * 3
    index[dim] = slice(start, stop)
    np.testing.assert_array_equal(part.array, whole.array[tuple(index)])
    assert part.placement == {"tp": dim} and part.global_shape == (4, 6, 4) and part.offset[dim] == start


def test_cutting_is_for_described_parameters_and_inside_their_shape():
    p = parameter("w", (4, 6), init.zeros)
    with pytest.raises(ShapeError, match=r'parameter "w" of shape \(4, 6\) has no \[2, 9\) in dim 0'):
        p.narrow("tp", 0, 2, 9)
    FlatStorage([p])
    with pytest.raises(GraphError, match="has memory already"):
        p.narrow("tp", 0, 0, 2)


def test_backward_writes_into_the_attached_arena():
    model = small()
    storage = model.initialize()
    arena = storage.attach_gradients()
    x = np.ones((2, 3), np.float32)
    model(x).backward(np.ones((2, 2), np.float32))
    for segment, view in zip(storage.segments, storage.views(arena)):
        assert np.shares_memory(segment.parameter.grad, arena)
        np.testing.assert_array_equal(segment.parameter.grad, view)
    assert (model["b"].bias.grad == 2.0).all()


def test_flat_arrays_of_another_layout_and_unknown_precisions_are_refused():
    with pytest.raises(ShapeError, match=r"has shape \(64,\), this one \(63,\)"):
        small().initialize().views(np.zeros(63))
    with pytest.raises(ConfigError, match='unknown precision "float8"'):
        small().initialize(dtype="float8")


def test_a_model_without_parameters_and_parameters_without_elements_work():
    assert Sequential().initialize().size == 0
    storage = FlatStorage([parameter("e", (0, 3), init.zeros), parameter("f", (), init.ones)])
    storage.initialise(0)
    assert [v.shape for v in storage.views(storage.values)] == [(0, 3), ()] and storage.values[0] == 1.0
    assert repr(storage) == "FlatStorage(2 parameters, 1 values, float32, cpu)"
