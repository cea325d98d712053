"""Rotary positions on a device, in one pass, against the operations of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_counts import counted
from fakegpu import DEVICES, open_device, put

from mpitrain import ops
from mpitrain.autograd import Tensor, grad
from mpitrain.backend import asnumpy

PLACES = {"0, 1, ...": None, "of all": np.arange(20)[::-1] ** 2, "of each": np.arange(60).reshape(3, 1, 20) % 17,
          "of each and one": np.arange(60).reshape(3, 1, 20), "of heads": np.arange(40).reshape(2, 20),
          "of each head": np.arange(120).reshape(3, 2, 20), "of none": np.zeros((0, 1, 20), int)}


def turned(here: Any, x: np.ndarray, places: Any, **options: Any) -> list[np.ndarray]:
    """Values, the gradient of their sum of squares times a constant, and the gradient of a sum of that."""
    start = Tensor(here(x), requires_grad=True)
    y = ops.rotary_embedding(start, places, base=100.0, **options)
    first, = grad([(y ** 3).sum()], [start], create_graph=True)
    second, = grad([(first ** 2).sum()], [start])
    return [asnumpy(part.array) for part in (y, first, second)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("options", [{}, {"width": 6}, {"width": 10, "interleaved": True}, {"width": 0}], ids=str)
def test_a_device_turns_as_the_host_does_in_derivatives_too(places: str, options: dict[str, Any], device: str) -> None:
    _, move, _ = open_device(device)
    samples = 0 if places == "of none" else 3
    x = np.random.default_rng(0).standard_normal((samples, 2, 20, 10))
    on_device, on_host = (turned(here, x, PLACES[places], **options) for here in (move, np.array))
    for found, wanted in zip(on_device, on_host, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_float32_has_the_bits_of_the_host() -> None:
    x = np.random.default_rng(0).standard_normal((3, 2, 20, 64)).astype("float32")
    for width in (64, 32):
        found, wanted = (ops.rotary_embedding(here(x), width=width).array for here in (put, np.array))
        np.testing.assert_array_equal(asnumpy(found), wanted)


def test_angles_go_up_once_and_a_layer_is_a_launch_each_way() -> None:
    x = Tensor(put(np.random.default_rng(0).standard_normal((3, 2, 33, 8)).astype("float32")), requires_grad=True)
    ops.rotary_embedding(x, base=77.0)
    with counted() as counts:
        y = ops.rotary_embedding(x, base=77.0)
    assert counts.up == counts.n_syncs == 0 and counts.n_launches == 1
    start = put(np.ones(x.shape, "float32"))
    with counted() as counts:
        y.backward(start)
    assert counts.up == counts.n_syncs == 0 and counts.launches["rotary_float32"] == 1
