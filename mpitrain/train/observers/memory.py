"""What the memory of a rank is for, measured in a run: by asking its arrays, and the pool that they come from."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend.memory import pool_in_use
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.policies.sharded_reducer import ShardedReducer
from mpitrain.placement.bytes import Use
from mpitrain.train.build.assembly import Job


def measured(job: Job) -> Use:
    """What this rank has, by asking its arrays and their pool; after the last step."""
    reducer: GradientReducer = job.trainer.pipeline.reducer
    optimizer, sharding, storage = job.state.optimizer, job.state.sharding, job.state.model.storage
    assert optimizer is not None and storage is not None
    if sharding is not None and sharding.gathered is not None:
        parameters = sharding.shards.values
    else:
        parameters = storage.values                                         # type: ignore[attr-defined]
    state = optimizer.nbytes
    away = job.options.offload != "none"
    gradients = sum(arena.nbytes for arena in reducer.arenas)
    use = Use(parameters.nbytes, gradients, 0 if away else state, state if away else 0, None, None)
    pool = pool_in_use()
    if pool is None or storage.device.name != "cpu":
        return use
    elsewhere = [parameters, *reducer.arenas, *(() if away else optimizer.state.values())]
    if isinstance(reducer, ShardedReducer) and reducer.memory is not None:
        elsewhere.append(reducer.memory.flat)
    shared = sum(array.nbytes for array in elsewhere if not is_own(array))
    swing = job.trainer.memory
    taken = pool.usage().system if swing.system is None else swing.system
    return use._replace(activations=swing.most, pool=taken + shared)


def is_own(array: Any) -> bool:
    """Whether a host array's memory is NumPy's, not shared with other processes or mapped from a file."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return bool(array.flags.owndata)
