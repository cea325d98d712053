"""Optimizer state on the host of a device: few copies in pinned memory, in the order of streams, with the bits of one update."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from fakegpu import DeviceArray, put, xp

from mpitrain import models
from mpitrain.backend import CPU, Device
from mpitrain.kernels.optimizer import FACTOR, FOUND
from mpitrain.optim import LAMB, AdamW, on_host
from mpitrain.optim.on_host import OnHost

FAKE = Device("gpu", xp)


class Stream:
    """A stream whose copies happen when somebody waits for an event after them, or when they are overtaken at the end."""

    def __init__(self, non_blocking=False):
        self.asked, self.waits = [], []

    def record(self):
        def synchronize():
            while self.asked:
                self.asked.pop(0)()
        return SimpleNamespace(synchronize=synchronize)

    def synchronize(self):
        self.record().synchronize()

    def wait_event(self, event):
        event.synchronize()


@pytest.fixture
def streams(monkeypatch):
    """The stand-in with streams and pinned memory: what was asked for is not done before it is waited for."""
    current, copies, get = Stream(), [], DeviceArray.get

    def later(array, stream=None, out=None, blocking=True):
        if stream is None:
            return get(array)
        assert not blocking
        copies.append("down")
        stream.asked.append(lambda: out.__setitem__(..., get(array)))
        return out

    def set_later(array, source, stream):
        copies.append("up")
        stream.asked.append(lambda: array.__setitem__(..., put(source.copy())))
    monkeypatch.setattr(DeviceArray, "get", later)
    monkeypatch.setattr(DeviceArray, "set", set_later, raising=False)
    cuda = SimpleNamespace(Stream=Stream, get_current_stream=lambda: current,
                           alloc_pinned_memory=lambda n: np.full(n, 0x7f, np.uint8))
    monkeypatch.setattr(type(xp), "cuda", cuda, raising=False)
    return copies


def pair(make):
    plain = models.mlp(20, [30, 17], 5).initialize(3)
    there = models.mlp(20, [30, 17], 5).initialize(3, device=FAKE)
    return make(plain), OnHost(make, there)


def gradients(storage, step):
    flat = np.zeros(storage.size, np.float32)
    for s in storage.segments:
        flat[s.start:s.stop] = np.random.default_rng([step, s.start]).standard_normal(s.stop - s.start)
    return flat


@pytest.mark.parametrize("make", [lambda s: AdamW(s, 0.01, weight_decay=0.1, decay="matrices"), lambda s: LAMB(s, 0.01)])
@pytest.mark.parametrize(("piece", "count"), [(1 << 20, 1), (4000, 2), (1, 6)])
def test_parameters_go_down_and_up_in_pieces_and_each_update_has_what_it_needs(streams, monkeypatch, make, piece, count):
    monkeypatch.setattr(on_host, "PIECE", piece)
    plain, ours = pair(make)
    for step in (1, 2, 3):
        flat = gradients(plain.storage, step)
        plain.update(flat, lr=0.01, step=step, scale=0.5)
        del streams[:]
        ours.update(put(flat), lr=0.01, step=step, scale=0.5)
        assert streams == ["down"] * count * (2 if step == 1 else 1) + ["up"] * count
        np.testing.assert_array_equal(ours.device_storage.values.get(), plain.storage.values)


def test_parameters_that_somebody_has_written_come_down_first(streams):
    plain, ours = pair(lambda s: AdamW(s, 0.01))
    for step in (1, 2):
        for storage, put_there in ((plain.storage, CPU.put), (ours.device_storage, put)):
            segment = storage.segments[0]
            storage.values[segment.start:segment.stop] = put_there(np.full(segment.stop - segment.start, step, np.float32))
            segment.parameter.mark_changed()
        flat = gradients(plain.storage, step)
        plain.update(flat, lr=0.01, step=step)
        ours.update(put(flat), lr=0.01, step=step)
        np.testing.assert_array_equal(ours.device_storage.values.get(), plain.storage.values)


def test_numbers_of_the_device_and_the_copy_in_16_bits_are_obeyed():
    plain, ours = pair(lambda s: AdamW(s, 0.01))
    ours.device_storage.compute = xp.empty(plain.storage.size, ml_dtypes.bfloat16)
    flat, numbers = gradients(plain.storage, 1), np.zeros(8)
    numbers[FACTOR] = 0.25
    plain.update(flat, lr=0.01, step=1, scale=0.25)
    ours.update(put(flat), lr=0.01, step=1, numbers=put(numbers))
    np.testing.assert_array_equal(ours.device_storage.values.get(), plain.storage.values)
    for s in plain.storage.segments:
        np.testing.assert_array_equal(ours.device_storage.compute.get()[s.start:s.stop],
                                      plain.storage.values[s.start:s.stop].astype(ml_dtypes.bfloat16))
    numbers[FOUND] = 1
    ours.update(put(flat), lr=0.01, step=2, numbers=put(numbers))
    np.testing.assert_array_equal(ours.device_storage.values.get(), plain.storage.values)
