"""`reproducible = "layout"`: the same bits on any number of ranks. What it asks for, and what it refuses by name.

The micro-batch is the unit of arithmetic, and sums over micro-batches are made in one tree (`placement.tree`). Everything else in
a step works on one micro-batch, or on sums that all ranks hold already; what does not is refused here.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.backend import Device
from mpitrain.comm.messages.algorithms import name_of
from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import ConfigError, nearest
from mpitrain.nn import Module, SyncBatchNorm
from mpitrain.train.machine import fingerprint
from mpitrain.train.machine.environment import blas

MODE = 'train.reproducible = "layout"'


def is_asked_for(mode: str) -> bool:
    """Whether the mode is this one. ConfigError where it is none."""
    if mode not in ("run", "layout"):
        raise ConfigError(f'train.reproducible = "{mode}" is not there{nearest(mode, ("run", "layout"))}')
    return mode == "layout"


def refuse_options(micro_batches: int, algorithm: Any, wire: str = "float32") -> None:
    """ConfigError where the configuration leaves the arithmetic to the number of ranks."""
    if not micro_batches:
        raise ConfigError(f"{MODE} needs train.micro_batches: each micro-batch is computed by itself, so their number must not "
                          "follow the number of ranks; set it to the most ranks you will use, a power of two where you can")
    if algorithm != "auto":
        raise ConfigError(f'{MODE} adds gradients in an order of its own, found comm.algorithm = "{name_of(algorithm)}"; '
                          'leave comm.algorithm = "auto"')
    if wire != "float32":
        raise ConfigError(f'{MODE} rounds nothing on its way between ranks, found comm.wire_dtype = "{wire}"; leave it "float32"')


WHY_NOT = {
    "tp": "ranks that share a layer add up parts of its products, which one rank adds in another order",
    "cp": "ranks that share samples add up parts of the gradients and of attention, which one rank adds in another order",
    "ep": "a gradient of an expert adds up rows of several ranks' micro-batches, which one rank adds one micro-batch after the "
          "other"}


def refuse_mesh(sizes: Callable[[str], int]) -> None:
    """ConfigError for axes (`sizes` gives their lengths) along which sums that one rank makes are made in parts."""
    for axis, reason in WHY_NOT.items():
        if sizes(axis) > 1:
            raise ConfigError(f"{MODE} cannot have mesh.{axis} = {sizes(axis)}: {reason}; set mesh.{axis} = 1 and use mesh.pp or "
                              "mesh.dp")


def refuse_model(model: Module, device: Device) -> None:
    """ConfigError naming what would have other bits on other ranks, or from one time to the next."""
    for name, layer in model.named_modules():
        if isinstance(layer, SyncBatchNorm):
            raise ConfigError(f'{MODE} cannot have the layer "{name}" ({type(layer).__name__}): its statistics are of the '
                              'micro-batches that ranks run at the same time; use batch norm (norm = "batch")')
    if device.xp is not np:
        raise ConfigError(f'{MODE} is for train.device = "cpu", found "{device.name}": there the gradient of an embedding is '
                          "summed by atomic additions, in an order that timing decides")


def refuse_threads() -> None:
    """ConfigError unless BLAS has one thread: how it shares a product among several is its own affair."""
    threads = {library["num_threads"] for library in blas() if library.get("internal_api") != "openmp"}
    if threads - {1}:
        raise ConfigError(f"{MODE} needs one BLAS thread a rank, found {max(threads)}; call "
                          "mpitrain.train.machine.threads.pin(1) first, or set OMP_NUM_THREADS=1")


def agree_on_numerics(channel: Channel, n_micro: int) -> dict[str, str]:
    """What the bits of this run depend on beside its configuration and data. DesyncError where ranks differ; it communicates."""
    mine = fingerprint.numerics()
    fingerprint.agree(mine, socket.gethostname(), channel)
    return {"micro_batches": str(n_micro), **mine}
