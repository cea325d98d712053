"""The memory a run has taken, asked of its arrays, their pool and the system; told at the end.

On a GPU it is the pools of the device that are asked, in the first `WATCHED` steps: those that follow take the same memory, and
counting takes time of the host for each array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.backend.memory import Swing, pool_in_use, resident
from mpitrain.comm.messages.channel import Channel
from mpitrain.placement.bytes import Use
from mpitrain.train.build.assembly import Job
from mpitrain.train.intervals import Step
from mpitrain.train.observers.observer import Observer, Watched

if TYPE_CHECKING:
    from mpitrain.backend.device_memory import DevicePool


WATCHED = 3                                  # steps on a device; by then all graphs are captured


class Memory(Observer):
    """Counts bytes of arrays within steps. A run that finishes tells the peak over ranks, and the text that `words` makes
    of all ranks' (stage, use)."""

    def __init__(self, job: Job, words: Callable[[Sequence[tuple[int, Use]]], Iterable[str]] = lambda uses: ()):
        self.job, self.words = job, words
        self.device_pool = _device_pool(job)
        self.swing = Swing(pool_in_use() if self.device_pool is None else self.device_pool)
        self.n_watched, self.counting = 0, False             # whether the pools of a device count, as they do within a step
        self.uses: list[tuple[int, Use]] = []                # all ranks' pairs, once the run is over

    def begin(self, run: Watched) -> None:
        self.run = run

    def before_step(self, step: int) -> None:
        if self.device_pool is not None:
            if self.n_watched >= WATCHED:
                return
            self.device_pool.__enter__()
            self.counting = True
        self.swing.begin(self.job.trainer.pipeline.sent_bytes)

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        if self.device_pool is not None:
            if self.n_watched >= WATCHED:
                return
            self.n_watched += 1
            self.close()
        self.swing.end(self.job.trainer.pipeline.sent_bytes)

    def close(self) -> None:
        """After a step that has failed, too: the next run of this process, such as a trial of a study, counts by itself."""
        if self.counting and self.device_pool is not None:
            self.device_pool.__exit__()
            self.counting = False

    def finish(self, step: int) -> Mapping[str, Any]:
        if step < self.run.plan.steps:
            return {}
        peak = peak_memory(self.job.channel, self.device_pool)
        self.run.tell("most memory of a rank: " + ", ".join(f"{name} {mb:,.0f} MiB" for name, mb in peak.items()))
        self.uses = [(int(stage), Use(*use)) for stage, use in self.job.channel.gather_objects(
            [self.job.context.stage.index, list(self.measured())])]
        for line in self.words(self.uses):
            self.run.tell(line)
        return {"peak_mb": peak}

    def measured(self) -> Use:
        """The memory use of this rank after the last step."""
        policy = self.job.policy
        reducer, optimizer, parameters = policy.reducer, policy.optimizer, policy.values
        away = self.job.config.optimizer.offload != "none"
        gradients = sum(arena.nbytes for arena in reducer.arenas)
        of_optimizer = optimizer.nbytes
        copies = sum(observer.copied_bytes for observer in self.job.trainer.observers)
        copies += policy.storage.values.nbytes if policy.masters else 0
        copied = getattr(policy.layout, "compute", None)      # in 16 bits, which operations on a device read
        values = parameters.nbytes + (0 if copied is None else copied.nbytes)
        residuals = 0 if policy.compressed is None else policy.compressed.state_bytes
        use = Use(values, gradients, 0 if away else of_optimizer, of_optimizer if away else 0, None, None, copies, residuals,
                  policy.level.nbytes)
        if self.device_pool is not None:
            return use._replace(activations=self.swing.most, pool=self.swing.system)
        pool = pool_in_use()
        if pool is None:
            return use
        elsewhere = [parameters, *reducer.arenas, *reducer.passing, *(() if away else optimizer.state.values())]
        shared = sum(array.nbytes for array in elsewhere if not is_own(array))
        taken = pool.usage().system if self.swing.system is None else self.swing.system
        return use._replace(activations=self.swing.most, pool=taken + shared)


def _device_pool(job: Job) -> DevicePool | None:
    """The pools of the run's device, with those of its graphs; None on the host."""
    device = job.policy.layout.device
    if device.xp is np:
        return None
    from mpitrain.backend.device_memory import DevicePool  # a run on the host needs none
    graphs = job.trainer.pipeline.graphs
    return DevicePool(device, lambda: () if graphs is None else graphs.pools)


def is_own(array: Any) -> bool:
    """Whether a host array's memory is NumPy's, not shared with other processes or mapped from a file."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return bool(array.flags.owndata)


def peak_memory(channel: Channel, device: DevicePool | None = None) -> dict[str, float]:
    """The peak memory of any rank, in MiB: resident, in arrays if these come from pools, and what the pools of the device have
    taken of it. It communicates."""
    pool = pool_in_use()
    mine = {"resident": resident(peak=True)} | ({"arrays": pool.usage().peak} if pool else {})
    if device is not None:
        mine["device"] = device.usage().system
    ranks = channel.gather_objects(mine)
    return {name: round(max(rank[name] for rank in ranks) / 2**20, 1) for name in ranks[0] if all(name in rank for rank in ranks)}
