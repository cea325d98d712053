"""The ranks of a job in groups of equal size, each of which trains one trial after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mpitrain.comm.job import guard
from mpitrain.comm.watch.unwatched import NOBODY, Unwatched
from mpitrain.config import Config, changed
from mpitrain.config.sections import MeshConfig
from mpitrain.errors import MeshError
from mpitrain.run.session import Session
from mpitrain.search.cost import memory_of_a_rank

LOOK_S = 5e-3                  # pauses of ranks that wait for other groups; a barrier of MPI would take a core from those


class Groups:
    """All ranks of `comm` make one, with the same arguments, and close it; it communicates.

    Ranks g*n to g*n + n - 1 are group g. `whole` is a session of all ranks, which knows the data and the machine, and `session`
    one of this rank's group, on the mesh of `config`, that the group's runs come after. `pulse` is watched with all ranks' from
    now on, and rests until a run begins.
    """

    def __init__(self, comm: Any, config: Config, ranks: int, files: Callable[[], Any], pulse: Unwatched = NOBODY):
        with guard.symmetric():
            refuse_size(comm.size, ranks)
        self.world, self.count, self.number = comm, comm.size // ranks, comm.rank // ranks
        self.whole = Session(changed(config, mesh=_no_axes()), comm)
        self.pulse = pulse
        pulse.opens()
        self.whole.open(self.whole.config, files, pulse)
        self.whole.inputs.fit(self.whole.control)             # a sample is transformed where a model is tried
        self.threads = self.whole.threads                     # those of a rank of a full node: other groups compute, too
        hosts = [place.host for place in self.whole.places]
        self.room = min(self.whole.control.gather_objects(memory_of_a_rank(hosts.count(hosts[comm.rank]))))      # bytes of a rank
        self.comm = comm.Split(self.number, comm.rank)
        self.config = changed(config, train={"threads": self.threads})
        self.session = self._session()
        pulse.rest()

    def _session(self) -> Session:
        try:
            made = Session(self.config, self.comm)
            made.open(self.config, lambda: self.whole.files)
        except MeshError as error:                            # which says how many ranks mpirun is to start
            with guard.symmetric():
                raise MeshError(f"{error.message}; in a study these are the ranks of a trial, search.ranks = {self.comm.size}"
                                ) from None
        first = self.number * self.comm.size                  # of this group, among all ranks
        mine = self.whole.places[self.world.rank].host
        made.mesh.before = [place.host for place in self.whole.places[:first]].count(mine)
        return made

    @property
    def is_first(self) -> bool:
        """Whether this rank decides for its group."""
        return bool(self.comm.rank == 0)

    def rest(self) -> None:
        """While this rank waits for other groups: raises where MPI knows that a rank of the job is lost. A launcher that leaves
        lost ranks out (--with-ft ulfm) does not end the others, and a file would be waited for in vain."""
        self.world.Iprobe()
        self.pulse.rest()

    def meet(self) -> None:
        """Returns when all ranks of the job have come here; those that wait sleep."""
        everyone = self.world.Ibarrier()
        while not everyone.Test():
            time.sleep(LOOK_S)
            self.rest()

    def close(self) -> None:
        """It communicates."""
        self.session.close()
        self.comm.Free()
        self.whole.close()


def refuse_size(size: int, ranks: int) -> None:
    """MeshError unless the job's ranks are a multiple of those of a trial."""
    if size % ranks:
        do = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        sizes = " or ".join(str(n) for n in (size - size % ranks, size - size % ranks + ranks) if n)
        raise MeshError(f"search.ranks = {ranks} does not divide the {size} ranks of this job (these do: {do}); set it to one of "
                        f"them, or start {sizes} ranks")


def _no_axes() -> dict[str, Any]:
    """A mesh of data-parallel ranks alone, of any number."""
    plain = MeshConfig()
    return {axis: getattr(plain, axis) for axis in ("site", "pp", "dp", "ep", "cp", "tp")}
