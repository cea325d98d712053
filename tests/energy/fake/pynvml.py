"""NVML of a host with two GPUs, whose limits lie in a file (FAKE_NVML), as the functions of `nvidia-ml-py` 13 tell of them.

`test_knobs` compares the signatures with the package where that is installed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

NVML_ERROR_NO_PERMISSION, NVML_ERROR_NOT_FOUND = 4, 6
UUIDS = ("GPU-0b", "GPU-1c")


class NVMLError(Exception):
    def __init__(self, value: int):
        super().__init__(f"error {value}")
        self.value = value


def nvmlInit() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return len(UUIDS)


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    if not 0 <= index < len(UUIDS):
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    return UUIDS.index(uuid)


def nvmlDeviceGetIndex(handle: int) -> int:
    return handle


def nvmlDeviceGetPowerManagementLimit(handle: int) -> int:
    return int(json.loads(Path(os.environ["FAKE_NVML"]).read_text())[handle])


def nvmlDeviceGetPowerManagementLimitConstraints(handle: int) -> list[int]:
    return [100_000, 700_000]


def nvmlDeviceSetPowerManagementLimit(handle: int, limit: int) -> None:
    if os.environ.get("FAKE_NVML_MAY") == "0":
        raise NVMLError(NVML_ERROR_NO_PERMISSION)
    path = Path(os.environ["FAKE_NVML"])
    limits = json.loads(path.read_text())
    limits[handle] = limit
    path.write_text(json.dumps(limits))


NVML_ERROR_GPU_IS_LOST = 15
ADDRESSES = (b"0000:17:00.0", b"0000:65:00.0")


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetHandleByPciBusId(pciBusId: bytes) -> int:
    if pciBusId not in ADDRESSES:
        raise NVMLError(NVML_ERROR_NOT_FOUND)
    return ADDRESSES.index(pciBusId)


def nvmlDeviceGetName(handle: int) -> str:
    return "NVIDIA H200"


def nvmlDeviceGetTotalEnergyConsumption(handle: int) -> int:
    """Of a list in the file FAKE_NVML_MJ; a GPU without a number is lost."""
    found = json.loads(Path(os.environ["FAKE_NVML_MJ"]).read_text())[handle]
    if found is None:
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return int(found)
