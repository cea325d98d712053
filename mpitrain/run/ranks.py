"""The ranks of a communicator at work on one configuration: what a run, and saved models in use, have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from subprocess import Popen
from types import TracebackType
from typing import Any, Self

import numpy as np

from mpitrain.backend import keep_freed_memory
from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import set_for_survivors, start, started
from mpitrain.comm.watch.pulse import pulse_of
from mpitrain.comm.watch.unwatched import NOBODY
from mpitrain.config import Config
from mpitrain.errors import UsageError
from mpitrain.run.session import Session, before_mpi, look_at_files


class Ranks(AbstractContextManager["Ranks"]):
    """The ranks of `comm`, any communicator, at work on `config`: all of them make it, call its methods and close it alike.

    Several may follow each other in one process, or go on side by side on communicators that have been split. An error that all
    ranks of a run meet alike (a wrong configuration) is raised, and leaves other runs alone; one that a rank of several meets by
    itself, in a method or in the run's `with` block, ends the whole job, since the others would wait for that rank. `process` has
    the request to stop. `files` gives the result of `session.look_at_files` if a program has looked before it started MPI.
    `after` is the open session of these ranks that other runs used, with the same data and mesh: what it has found out is used
    again, and it stays open.
    UsageError, on all ranks alike, without a communicator and after `close`.
    """

    trains = False                                           # whether [energy]'s limits are set for these ranks

    def __init__(self, config: Config, comm: Any, *, process: Process | None = None, quiet: bool = False,
                 files: Callable[[], Any] | None = None, after: Session | None = None):
        with guard.symmetric():
            if not comm or not hasattr(comm, "Create_cart"):
                raise UsageError(f"a run needs the communicator of its ranks, such as start().comm, found {comm!r}; a rank "
                                 "without one (MPI.COMM_NULL) makes no Run")
        self.config, self.comm, self.process, self.quiet = config, comm, process or Process(), quiet
        self._files = files or (lambda: look_at_files(config))
        self._after = after
        self._session: Session | None = None
        self._closed = False
        self.limits: list[str] = []                          # what is set on the hosts for this run, a line each

    @classmethod
    def of_job(cls, config: Config, process: Process | None = None, *, quiet: bool = False,
               parser: Popen[bytes] | None = None, look: Callable[[], Any] | None = None) -> Self:
        """All ranks of the job; it starts MPI. Ranks are watched (`train.stall_s`) if `process` runs the program.
        `parser` is that of `files.parser`, if rank 0 has started one before its imports. `look` describes, on rank 0, other data
        than the configuration's."""
        keep_freed_memory()                                  # this may ask the compiler: nothing forks once MPI has started
        if config.train.device != "cpu":
            from mpitrain.backend.compiling import compile_ahead
            compile_ahead(config.train.device)
        if process is not None and process.runs and process.pulse is NOBODY and started() is None:
            process.pulse = pulse_of(config.train.stall_s, config.train.start_s, config.train.stall)
        process = process or Process()
        if cls.trains and config.energy.limits:
            from mpitrain.run.limits import hold  # few runs limit their hosts
            hold(config, process)
        if config.train.on_lost != "stop":
            set_for_survivors(os.environ)
        files = before_mpi(look or (lambda: look_at_files(config, parser)))
        comm = start().comm
        process.pulse.started()
        return cls(config, comm, process=process, quiet=quiet, files=files)

    def open(self) -> Session:
        """The session of these ranks, made at the first call. `config` has the sizes then that its data say."""
        with guard.symmetric():
            if self._closed:
                raise UsageError(f"this run is closed; make another one: {type(self).__name__}(config, comm)")
        if self._session is None:
            self.process.pulse.opens() if self._after is None else self.process.pulse.recovers()
            self._session = Session(self.config, self.comm, self._after)
            self.process.tells_others = self._session.mesh.revoke
            self._opens(self._session)
            self._session.open(self.config, self._files, self.process.pulse)
            if self.trains and self.config.energy.limits:
                from mpitrain.run.limits import agree
                self.limits = agree(self.config, self._session.control, self._session.places, self.process)
                self._session.notes += self.limits
            self.config = self._session.config
        return self._session

    def close(self) -> None:
        """Frees channels and communicators; it communicates, but not again. A program may do so, too, after an error that all
        ranks had alike."""
        session, self._session, self._closed = self._session, None, True
        if session is not None:
            self._ends(session)
        self.process.pulse.rest()
        self._put_back()

    def _put_back(self) -> None:
        """Ends the limits of this host, unless the program goes on with other runs."""
        if not self.process.runs:
            self.process.put_back()

    def _opens(self, session: Session) -> None:
        """A session is made, and not open yet."""

    def _ends(self, session: Session) -> None:
        """Frees its channels and communicators; it communicates."""
        session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:                                    # freeing is collective: not after a rank has failed
            self.close()
        elif self.comm.size > 1 and not guard.is_symmetric(error):
            self.process.fail(error)
        else:
            self._put_back()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """NaN and Inf are detected, and named, where they matter; an error of this rank alone ends the job."""
        with self.process.guarding() if self.comm.size > 1 else nullcontext(), np.errstate(all="ignore"):
            yield
