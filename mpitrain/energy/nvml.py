"""Joules of GPUs by NVML's counter, which begins when the driver is loaded: `nvmlDeviceGetTotalEnergyConsumption`, in millijoules
(Volta and newer). The package is nvidia-ml-py (`mpitrain[nvml]`); what it is asked is what its module `pynvml` has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain.energy.zones import Lost
from mpitrain.errors import AccessError, ConfigError, MissingError

INSTALL = "energy.source = \"nvml\" needs the package nvidia-ml-py; pip install 'mpitrain[nvml]'"


def load() -> Any:
    """NVML's module, initialised. ConfigError without the package, MissingError without a driver."""
    try:
        import pynvml
    except ImportError:
        raise ConfigError(INSTALL) from None
    if not hasattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption"):
        raise ConfigError(f"{INSTALL}; the module pynvml that is installed has no counter of energy")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise MissingError(f"NVML finds no driver of NVIDIA's: {error}") from None
    return pynvml


class Gpus:
    """The counters of the GPUs at these addresses on the bus ("0000:17:00.0"), or of all GPUs of this host."""

    kind, measured, lag_s = "nvml", True, 0.0

    def __init__(self, addresses: Sequence[str] = (), nvml: Any = None):
        self.nvml = nvml = load() if nvml is None else nvml
        self._handles: dict[str, Any] = {}
        try:
            if not addresses:
                handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            else:
                handles = [nvml.nvmlDeviceGetHandleByPciBusId(address.encode()) for address in dict.fromkeys(addresses)]
            self._handles = {f"gpu {i} ({_text(nvml.nvmlDeviceGetName(handle))})": handle for i, handle in enumerate(handles)}
            self._began = {name: self._counted(handle) for name, handle in self._handles.items()}
        except nvml.NVMLError as error:
            self.close()
            denied = getattr(error, "value", None) == getattr(nvml, "NVML_ERROR_NO_PERMISSION", object())
            raise (AccessError if denied else MissingError)(
                f"NVML counts no energy of this host's GPUs: {error} (older ones than Volta have no counter)") from None
        if not self._handles:
            self.close()
            raise MissingError("NVML finds no GPU on this host")
        self._last = dict(self._began)

    def joules(self) -> float:
        """What all GPUs have used since this object was made. Lost where a GPU does not answer, or its counter went back."""
        for name, handle in self._handles.items():
            try:
                found = self._counted(handle)
            except self.nvml.NVMLError as error:
                raise Lost(f"the counter of {name} cannot be read: {error}") from None
            if found < self._last[name]:
                raise Lost(f"the counter of {name} went back from {self._last[name]:,} to {found:,} mJ: it never begins anew "
                           "while the driver is loaded")
            self._last[name] = found
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """The joules of each GPU at the last reading."""
        return {name: (self._last[name] - began) / 1e3 for name, began in self._began.items()}

    def close(self) -> None:
        if self.nvml is not None:
            nvml, self.nvml = self.nvml, None
            nvml.nvmlShutdown()

    def _counted(self, handle: Any) -> int:
        return int(self.nvml.nvmlDeviceGetTotalEnergyConsumption(handle))


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name
