"""Array modules and devices."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from fakegpu import DeviceArray, put, xp

from mpitrain.backend import CPU, array_module, asnumpy, float_dtype, is_array, is_float, select_device
from mpitrain.backend.namespace import Device
from mpitrain.errors import ConfigError


def test_the_first_array_decides_the_module() -> None:
    assert array_module(1.0, np.ones(1)) is np and array_module(1.0, put([1.0])) is xp and array_module([1], 2) is np
    assert is_array(np.ones(1)) and is_array(put([1.0])) and not is_array(np.float32(1)) and not is_array([1])


def test_values_come_to_the_host_and_go_to_a_device() -> None:
    x = np.ones(2)
    assert asnumpy(x) is x and type(asnumpy(put(x))) is np.ndarray
    device = Device("stand-in", xp)
    there = device.put(x)
    assert type(there) is DeviceArray and device.put(there) is there and CPU.put(x) is x
    assert type(device.xp.empty(3, np.float32)) is DeviceArray


def test_devices_are_chosen_by_name() -> None:
    assert select_device("cpu") is CPU
    with pytest.raises(ConfigError, match='train.device is "cpu", "gpu" or "auto", not "tpu"'):
        select_device("tpu")


def test_without_cupy_auto_is_the_host_and_gpu_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert select_device("auto") is CPU
    with pytest.raises(ConfigError, match=r'train.device = "gpu", but CuPy cannot be imported .*; install mpitrain\[cuda12\]'):
        select_device("gpu")


def test_precisions_have_names() -> None:
    assert float_dtype("float32") == np.float32 and is_float(np.float64) and not is_float(np.int64)
    with pytest.raises(ConfigError, match=r'unknown precision "float23" \(did you mean "float32"\?\)'):
        float_dtype("float23")


def test_importing_the_package_compiles_nothing_and_starts_no_mpi() -> None:
    program = ("import sys, mpitrain, mpitrain.ops; "
               "print([name for name in ('numba', 'mpi4py', 'h5py', 'cupy', 'rich') if name in sys.modules])")
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"


def test_scopes_of_random_numbers_belong_to_their_thread() -> None:
    from mpitrain.backend import random
    seen: list[int] = []
    with random.use(random.Scope(seed=5)):
        thread = threading.Thread(target=lambda: seen.append(random.current().seed))
        thread.start()
        thread.join()
    assert seen == [0]
