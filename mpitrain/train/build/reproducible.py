"""`reproducible = "layout"`: the same bits on any number of ranks; its demands on the machine.

The micro-batch is the unit of arithmetic, and sums over micro-batches are made in one tree (`placement.tree`). Everything else in
step works on one micro-batch, or on sums that all ranks hold already; anything else is refused (`config.rules.same_bits`).
"""

from __future__ import annotations

import socket

from mpitrain.comm.messages.channel import Channel
from mpitrain.config.values import LAYOUT
from mpitrain.errors import ConfigError
from mpitrain.train.machine import fingerprint
from mpitrain.train.machine.environment import blas


def refuse_threads() -> None:
    """ConfigError unless BLAS has one thread: its split of a product among several is its own affair."""
    threads = {library["num_threads"] for library in blas() if library.get("internal_api") != "openmp"}
    if threads - {1}:
        raise ConfigError(f"{LAYOUT} needs one BLAS thread a rank, found {max(threads)}; call "
                          "mpitrain.train.machine.threads.pin(1) first, or set OMP_NUM_THREADS=1")


def agree_on_numerics(channel: Channel, n_micro: int) -> dict[str, str]:
    """The fingerprint that bits depend on beside configuration and data. DesyncError if ranks differ; it communicates."""
    mine = fingerprint.numerics()
    fingerprint.agree(mine, socket.gethostname(), channel)
    return {"micro_batches": str(n_micro), **mine}
