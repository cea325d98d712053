"""A run that goes on when ranks are lost (`train.on_lost`), where MPI can leave them out: ULFM.

    a rank dies      the others get an error out of MPI, or see its lock gone in shared memory
    leave            each revokes what connects the ranks, so that all others get an error too
    agree, shrink    a communicator of the ranks that are left
    save             the newest copy that they hold in memory becomes a checkpoint, unless a whole one on the disk is as new
    resume           a new session on these ranks goes on from there, as --resume does
"""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from mpitrain.checkpoint import store
from mpitrain.checkpoint.parts import Piece
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.checkpoint.saver import Saver
from mpitrain.checkpoint.spare import Neighbour, Spares, different, newest_whole
from mpitrain.comm.job import guard
from mpitrain.comm.job.failure import describe
from mpitrain.comm.job.together import on_first
from mpitrain.comm.job.turn import leaves_ranks_out
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.lost_peer import is_lost
from mpitrain.comm.watch.unwatched import NOBODY, Unwatched
from mpitrain.config import Config
from mpitrain.errors import DesyncError, MeshError, PeerError, UsageError, numbered
from mpitrain.run.session import Session
from mpitrain.schedules.grid import AXES, fit
from mpitrain.train.build.assembly import Job
from mpitrain.train.observers.observer import Observer

T = TypeVar("T")                                          # the result of a run
SOUND = (1 << 16) - 1                                     # no bit is missing: no rank has an error of its own
PATIENCE, ITS_TURN = 2.0, 1.0                            # seconds that an error waits for the others, and they for its line


class Keep(Observer):
    """Keeps copies of a job's state; a loss before the first goes on from the disk. `reached` is the last step done here."""

    def __init__(self, job: Job, saver: Saver, every: int, neighbour: Neighbour | None):
        self.saver, self.every, self.spares, self.reached = saver, every, Spares(neighbour), job.policy.step
        self.job: Job | None = job
        self.expected = job.state.expected()
        self._first = job.policy.step

    def before_step(self, step: int) -> None:
        self.reached = done = step - 1                        # evaluated and saved by now, if that was due
        if self.every and done > self._first and done % self.every == 0 and self.job is not None:
            self.spares.keep(done, dict(self.saver.about(self.job.trainer.meta(done))), self.job.state.held())

    def forget(self) -> None:
        """Lets go of the job, once nothing is written any more."""
        self.saver.wait()
        del self.saver
        self.job = self.spares.neighbour = None


class Survivors:
    """The ranks of a run that are left; each rank has one. `lost` tells of those that are not, as run.json does."""

    def __init__(self, config: Config, comm: Any, pulse: Unwatched = NOBODY):
        with guard.symmetric():
            refuse_without_ulfm(comm)
        self.config, self.comm, self.pulse = config, comm, pulse
        self.numbers = list(range(comm.size))                 # at the start of the run
        self.lost: list[dict[str, Any]] = []
        self.news: list[str] = []
        self.session: Session | None = None
        self._keep: Keep | None = None                        # of the session that trains, or trained last
        self._saved = True                                    # whether what it holds is of no more use
        self._gone: list[int] = []                            # whom the session before had, and this one has not

    def train(self, once: Callable[[Any], T], folder: RunFolder) -> T:
        """The result of `once(None)`, or, where ranks are lost in it, of `once(comm)` with the others."""
        trained, failure = self._attempt(lambda: once(None))
        while not self._agree(trained is not None, failure):
            self._shrink(failure)
            trained, failure = self._attempt(lambda: self._again(once, folder))
        assert trained is not None
        return trained

    def begin(self, session: Session, job: Job, saver: Saver) -> dict[str, Any]:
        """A session is about to train: it will keep copies. What run.json says of lost ranks."""
        neighbour, state, mesh = None, job.state, session.mesh
        if self.comm.size > 1 and (state.is_cut or state.shards is not None):
            neighbour = Neighbour(mesh.link(mesh.axes, "copies"), session.control, [place.host for place in session.places])
        self._keep, self._saved = Keep(job, saver, self.config.train.copy_every, neighbour), False
        job.trainer.observers.insert(0, self._keep)
        job.trainer.notes[:0], self.news = self.news, []
        return {"lost": self.lost} if self.lost else {}

    def close(self, session: Session) -> None:
        """Closes the session of a run that is done, also where a rank is lost at that moment."""
        try:
            session.close()
        except Exception as error:
            if not is_lost(error):
                raise
            session.mesh.abandon()

    def _attempt(self, action: Callable[[], T]) -> tuple[T | None, Exception | None]:
        """The result, or the error that says that a rank was lost; then nothing of the session is left but its copies."""
        try:
            return action(), None
        except Exception as error:
            if self._keep is None:                            # before training begins there is nothing to go on from
                raise
            if not guard.is_symmetric(error):                 # else others may be in the last collective before it, and all leave
                self._leave()
            if not is_lost(error):
                self._end_with_the_others(error)
                raise
            failure = error
        traceback.clear_frames(failure.__traceback__)         # they hold the model
        return None, failure

    def _leave(self) -> None:
        """Leaves the session, and has the other ranks leave it. It does not communicate."""
        self.comm.Revoke()
        session, self.session = self.session, None
        if session is not None:
            session.mesh.abandon()
        if self._keep is not None and self._keep.job is not None:
            self._keep.forget()

    def _agree(self, done: bool, failure: Exception | None) -> bool:
        """Whether all ranks are done; all of them hear the same. False where one was lost that nobody knew of.

        The error of this rank, or PeerError, where another one ends the job with an error of its own.
        """
        code, done, lost = self._worst(None, done)
        if code is not None:
            time.sleep(ITS_TURN)
            ends = failure if isinstance(failure, PeerError) else PeerError("another rank ends the job")
            ends.exit_code = code
            raise ends
        return done and not lost

    def _end_with_the_others(self, error: Exception) -> None:
        """Tells ranks that wait in `_agree` with which code this one ends the job: under ULFM not every abort reaches them."""
        self._worst(describe(error).exit_code, False, time.monotonic() + PATIENCE)

    def _worst(self, own: int | None, done: bool, end: float = math.inf) -> tuple[int | None, bool, bool]:
        """The lowest of the ranks' exit codes (None: no rank has one), whether all are done, whether one was lost.

        Bugs and causes have lower codes than requests to stop. MPI agrees on the bits that all ranks have set, so a rank clears
        one of 16 for each half of its code. It waits until `end` at the latest.
        """
        def one_of(half: int | None) -> int:
            return SOUND if half is None else SOUND ^ 1 << half

        said, lost = self._common(one_of(None if own is None else own >> 4) << 1 | done, end)
        high = lowest_missing(said >> 1)
        if high is None:
            return None, bool(said & 1), lost
        low = lowest_missing(self._common(one_of(own & 15 if own is not None and own >> 4 == high else None), end)[0])
        return PeerError.exit_code if low is None else high << 4 | low, False, lost      # None: who had it ended meanwhile

    def _common(self, bits: int, end: float) -> tuple[int, bool]:
        """The bits that all ranks have set, whether or not one was lost, which comes second; its own where time is up."""
        from mpi4py import MPI
        agreed = np.array([bits], np.int32)
        try:
            request = self.comm.Iagree(agreed)
            while not request.Test():
                if time.monotonic() > end:
                    return bits, False
                time.sleep(0.001)
        except MPI.Exception:                                 # the others hear of the loss, and the same bits, too
            return int(agreed[0]), True
        return int(agreed[0]), False

    def _shrink(self, failure: Exception | None) -> None:
        from mpi4py import MPI
        self._leave()                                         # this rank may have been done
        gc.collect()
        before, self.comm = self.comm, self.comm.Shrink()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        left = MPI.Group.Translate_ranks(self.comm.Get_group(), list(range(self.comm.size)), before.Get_group())
        gone = [number for i, number in enumerate(self.numbers) if i not in left]
        self.numbers, self._gone = [self.numbers[i] for i in left], self._gone + gone
        if not gone:
            raise failure or PeerError("another rank had an error of MPI, but no rank was lost")
        try:
            fit(self.comm.size, **{axis: getattr(self.config.mesh, axis) for axis in AXES if axis != "dp"})
        except MeshError as error:
            with guard.symmetric():
                raise PeerError(f"{numbered('rank', gone)} {_were(gone)} lost, and the others cannot go on: {error.message}; or "
                                "start again with --resume") from None

    def _again(self, once: Callable[[Any], T], folder: RunFolder) -> T:
        self.pulse.recovers()                                 # a checkpoint of any size is read, and one is written
        mesh = Mesh(self.comm, dp=self.comm.size)
        try:
            self._tell(*self._save(mesh, folder))
        except BaseException:
            mesh.abandon()
            raise
        mesh.close()
        return once(self.comm)

    def _save(self, mesh: Mesh, folder: RunFolder) -> tuple[int, int, str]:
        """The last step that was done, the one to go on from, and where it is. It communicates."""
        keep, channel = self._keep, mesh.channel(mesh.axes, "copies")
        assert keep is not None
        kept = [] if self._saved else keep.spares.sound()
        everyone = channel.gather_objects([keep.reached, {str(spare.step): spare.sizes() for spare in kept}])
        reached, chosen = max(step for step, _ in everyone), newest_whole([sizes for _, sizes in everyone], keep.expected)
        since = 0 if chosen is None else chosen[0]
        newest = on_first(channel, lambda: store.newest_whole_since(folder.checkpoints, since))
        if chosen is not None and chosen[0] > newest:
            newest, writers = chosen
            spare = next((one for one in kept if one.step == newest), None)
            key = different(channel.gather_objects({} if spare is None else spare.sums()))
            if key:
                with guard.symmetric():
                    raise DesyncError(f"the ranks that are left hold different bits of {key}; start again with --resume",
                                      step=newest)
            pieces = [] if spare is None else [piece for key, piece in spare.pieces.items() if writers[key] == channel.rank]
            self._write(channel, folder, newest, {} if spare is None else spare.meta, pieces)
        self._saved, keep.spares = True, Spares()
        where = "memory" if chosen is not None and chosen[0] == newest else "a checkpoint" if newest else "the beginning"
        return reached, newest, where

    def _write(self, channel: Any, folder: RunFolder, step: int, meta: Mapping[str, Any], pieces: Sequence[Piece]) -> None:
        """The pieces become a checkpoint, while rank 0 holds the folder. It communicates."""
        def take() -> None:
            folder.open(resume=True)
        on_first(channel, take)
        try:
            everyone = channel.gather_objects(dict(meta))
            store.save(folder.checkpoints, step, pieces, next(filter(None, everyone)), channel)
        finally:
            folder.close()

    def _tell(self, reached: int, step: int, where: str) -> None:
        gone, self._gone = self._gone, []
        self.lost.append({"step": reached, "ranks": gone, "left": len(self.numbers), "resumed": step, "from": where})
        begins = f"from step {step} (of {where})" if step else f"from {where}"
        self.news = [f"{numbered('rank', gone)} {_were(gone)} lost after step {reached}; {len(self.numbers)} left go on {begins}"]


def lowest_missing(bits: int) -> int | None:
    """The number of the lowest of SOUND's bits that is not set."""
    return next((number for number in range(SOUND.bit_length()) if not bits >> number & 1), None)


def _were(ranks: list[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def refuse_without_ulfm(comm: Any) -> None:
    """UsageError where the ranks, which are several, cannot go on without one of them."""
    if not hasattr(comm, "Shrink") or not leaves_ranks_out():
        raise UsageError('train.on_lost = "go_on" needs an MPI that leaves lost ranks out, found none at work; start with Open '
                         f'MPI 5 and mpi4py 4.1: "mpirun --with-ft ulfm -n {comm.size} ...", or set train.on_lost = "stop"')
