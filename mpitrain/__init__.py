"""mpitrain: parallel training of neural networks over MPI.

    mpirun -n 8 python -m mpitrain train run.toml

or from Python: `nn`, `ops`, `optim`, `Tensor`, `Mesh`, `train.assemble`, ... Importing this package starts no MPI and
compiles nothing; the names below are loaded when they are first used.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False                     # `typing` takes as long to import as the rest of the watcher's start (comm/watch)
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "Tensor": "autograd", "no_grad": "autograd", "enable_grad": "autograd", "recompute": "autograd", "gradcheck": "autograd",
    "Function": "autograd", "Mesh": "comm.mesh", "start": "comm.job.start",
    "load_config": "config", "MpitrainError": "errors", "Process": "comm.job.guard", "Run": "run",
    "SavedRun": "run.saved_run",
    "load": "infer.model",
}
_PACKAGES = ("autograd", "backend", "checkpoint", "comm", "data", "models", "nn", "ops", "optim", "parallel", "placement",
             "schedules", "train")

__all__ = ["__version__", *_WHERE, *_PACKAGES]     # noqa: PLE0604


def __getattr__(name: str) -> Any:
    import importlib
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    ops = sys.modules.get(f"{__name__}.ops")     # not imported for this: the import system asks here for each file of the package
    hint = f"; it is {__name__}.ops.{name}" if ops is not None and name in dir(ops) else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted(__all__)
