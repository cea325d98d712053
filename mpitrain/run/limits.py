"""Limits of the hosts that [energy] asks for: set before MPI starts by the first rank of each host, for all runs of a program."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain import errors
from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import local_rank, started
from mpitrain.config import Config
from mpitrain.errors import UsageError
from mpitrain.train.machine.threads import Place

if TYPE_CHECKING:
    from mpitrain.energy.limits import HostLimits


class ProcessLimits:
    """What all runs of this process may rely on: `wanted` holds on this host, if `host` (of its first rank) was not refused.
    `said` has a line for each setting of each host, once all ranks have agreed."""

    def __init__(self, wanted: dict[str, float], host: HostLimits | None):
        self.wanted, self.host = wanted, host
        self.said: list[str] | None = None
        self._end = -1                                       # of the guardian's pipe, in other ranks of its host

    def hold_too(self, contact: list[int]) -> None:
        """The limits stay while this rank lives, even if it goes on without the one that has set them."""
        from mpitrain.energy.limits import held_by
        self._end = held_by(*contact)

    def undo(self) -> list[str]:
        if self._end >= 0:
            os.close(self._end)
            self._end = -1
        return self.host.undo() if self.host is not None else []


def hold(config: Config, process: Process) -> None:
    """Every rank calls this before MPI starts. What is refused, `agree` raises on all of them. The process that `process` runs
    undoes it at its end, and a guardian where that comes early."""
    wanted = config.energy.limits
    if not wanted or process.limits is not None or started() is not None:
        return
    host = None
    if local_rank() == 0:
        from mpitrain.energy.limits import HostLimits  # few runs limit anything
        host = HostLimits(wanted, Path(config.energy.root))
    process.limits = ProcessLimits(wanted, host)


def agree(config: Config, control: Any, places: list[Place], process: Process) -> list[str]:
    """A line for each setting of each host; what one host has refused is raised on all ranks. UsageError for limits that nobody
    has set. The first call in a program, by all of its ranks, communicates if the configuration has limits."""
    wanted = config.energy.limits
    if not wanted:
        return []
    held = process.limits
    with guard.symmetric():
        if held is None or held.wanted != wanted:
            raise UsageError(f"limits of hosts ({', '.join(f'energy.{key}' for key in wanted)}) are set before MPI starts, for "
                             f"all runs of a program, and {'others' if held else 'none'} were; make this run with Run.of_job, or "
                             "leave them out")
    if held.said is not None:
        return list(held.said)
    host = held.host
    found = control.gather_objects([host.refused, host.said, host.contact()] if host is not None else [None, [], None])
    several = len({place.host for place in places}) > 1
    with guard.symmetric():
        for (refused, _, _), place in zip(found, places):
            if refused is not None:
                kind, message, file = refused
                raise getattr(errors, kind)(message + f" ({place.host})" * several, file=file)
    for (_, _, contact), place in zip(found, places):
        if contact is not None and host is None and place.host == places[control.rank].host:
            held.hold_too(contact)
    held.said = [f"{line} on {place.host} for this run" for (_, said, _), place in zip(found, places) for line in said]
    return list(held.said)
