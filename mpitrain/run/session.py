"""The common start of every run on its ranks: the mesh, the files looked at, threads pinned, warnings about the machine."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from itertools import pairwise
from subprocess import Popen
from typing import Any

from mpitrain.backend import keep_freed_memory
from mpitrain.comm.job import guard
from mpitrain.comm.job.start import launched_rank
from mpitrain.comm.job.together import on_first, same_everywhere
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.shared.leftovers import remove_leftovers
from mpitrain.comm.watch.unwatched import NOBODY, Unwatched
from mpitrain.config import Config
from mpitrain.data import Dataset
from mpitrain.errors import MpitrainError
from mpitrain.placement.bytes import Forecast, Use
from mpitrain.placement.place import place
from mpitrain.plan.memory import forecast_of
from mpitrain.schedules.grid import Grid
from mpitrain.train.build.assembly import Job
from mpitrain.train.build.inputs import Inputs, describe_files, inputs_of
from mpitrain.train.build.model import make_model
from mpitrain.train.build.sizes import said_by_data, with_sizes
from mpitrain.train.intervals import Plan
from mpitrain.train.machine import environment, threads
from mpitrain.train.machine.threads import Place


class Session:
    """All ranks of `comm` make one, open it and close it alike. `inputs` are there where it was opened with files.

    One `after` an open session of the same ranks, mesh, data and threads has what that one found out and made: to open it takes
    1 ms rather than 10, and only what was made since is freed when it closes.
    """

    mesh: Mesh
    control: Channel
    places: list[Place]
    threads: int
    inputs: Inputs

    def __init__(self, config: Config, comm: Any, after: Session | None = None):
        m = config.mesh
        self.config = config                                  # with the sizes that its data say, once they are open
        self.files: Any = None                                # what is in the data files, once they have been looked at
        self._after = after
        self._opened: dict[str, Dataset] = {} if after is None else after._opened
        self._machine: dict[str, Any] = {}                    # what run.json says of where the session is
        if after is not None:
            self.mesh, self._mark = after.mesh, after.mesh.mark()
            return
        with guard.symmetric():
            self.mesh = Mesh(comm, site=m.site, pp=m.pp, dp=m.dp, ep=m.ep, cp=m.cp, tp=m.tp)

    def open(self, config: Config, files: Callable[[], Any] | None, pulse: Unwatched = NOBODY) -> None:
        """`files()` gives, or raises, on rank 0 what `look_at_files` does; None: no data are read."""
        after = self._after
        if after is None:
            self._meet(config, pulse)
        else:
            self.control, self.places, self.threads, self.notes = after.control, after.places, after.threads, list[str]()
            self._machine = after.machine(config)
        if files is None:
            return
        self.files = on_first(self.control, files) if after is None or after.files is None else after.files
        with guard.symmetric():
            self.inputs = inputs_of(config, self.files, self._opened)
            sized = with_sizes(config, self.inputs, lambda action: on_first(self.control, action))
        self.notes += [given] if (given := said_by_data(config, sized)) else []
        self.config = sized

    def _meet(self, config: Config, pulse: Unwatched) -> None:
        """The ranks find out where they are, and whether they are alike. It communicates."""
        keep_freed_memory(config.train.cached_mb * 2**20 or None)
        self.control = control = self.mesh.channel(self.mesh.axes, "start-up")
        if control.size > 1:
            from mpitrain.train.machine import alike
        found = control.gather_objects([threads.place(), pulse.contact(), alike.same_files() if control.size > 1 else ""])
        self.places = [Place(*place) for place, *_ in found]
        pulse.join([contact for _, contact, _ in found], control.rank, self.mesh.progress)
        node = threads.on_node(self.places, control.rank)
        one = config.train.reproducible == "layout" or config.train.precision == "bfloat16" or config.workers.count > 0
        self.threads = threads.pin(1 if one else config.train.threads, node)
        self.mesh.progress.crowded = len(node) > threads.granted_cores(node)
        first = all(place.host != node[0].host for place in self.places[:control.rank])      # of its host
        self.notes = self.told_once([*(remove_leftovers() if first else []), pulse.obstacle,
                                     threads.crowded(self.threads, node), environment.slow_blas()])      # slow settings are told
        if control.size > 1:
            one_installation = len({files for *_, files in found}) == 1
            same_everywhere(control, alike.must_be_alike(config) | ({} if one_installation else alike.contents()))

    def told_once(self, said: Sequence[str]) -> list[str]:
        """The ranks' texts, each once. It communicates."""
        return told_once(self.control.gather_objects([self.places[self.control.rank].host, list(said)]))

    def summary(self, n_parameters: int, plan: Plan) -> str:
        """The size of the run in one line."""
        n, hosts = self.control.size, len({place.host for place in self.places})
        rows, held_out = len(self.inputs.train_rows), len(self.inputs.validation_rows)
        kind = "windows" if self.inputs.tokens or self.inputs.training.kind == "series" else "rows"
        return (f"{n_parameters:,} parameters, {rows:,} training and {held_out:,} validation {kind}; "
                f"{n} rank{'s' * (n > 1)} of {self.threads} thread{'s' * (self.threads > 1)}"
                f"{f' on {hosts} hosts' if hosts > 1 else ''}{f', mesh {self.mesh}' if self.mesh.cuts_model else ''}; "
                f"{plan.steps:,} steps of {plan.batch_size}")

    def describe(self, config: Config) -> dict[str, Any]:
        """The run and its environment, for run.json."""
        return {"name": config.run.name, "seed": config.run.seed} | self.machine(config)

    def machine(self, config: Config) -> dict[str, Any]:
        """The environment alone; looked at once."""
        if not self._machine:
            from mpi4py import MPI
            mesh = {axis: self.mesh.size(axis) for axis in self.mesh.axes}
            self._machine = environment.describe(
                mpi_library=MPI.Get_library_version(), hosts=[place.host for place in self.places], mesh=mesh,
                threads=self.threads, cores=[len(place.cores) for place in self.places], device=config.train.device)
        return self._machine

    def close(self) -> None:
        """It communicates."""
        if self._after is None:
            self.mesh.close()
        else:
            self.mesh.release(self._mark)


def look_at_files(config: Config, parser: Popen[bytes] | None = None) -> dict[str, Any]:
    """The content of the data files, told by a `files.parser`. Runs on rank 0, which will write files with h5py."""
    platform.processor()                     # h5py asks for it, and Python asks a child process: once, and now
    d = config.data
    config.refuse_without_data()
    return describe_files(d.path, d.validation, config.folder, d.x, d.y, parser, predictions=config.distil.predictions,
                          series=d.length > 0)


def predict_memory(config: Config, session: Session, job: Job) -> Forecast:
    """The ranks' memory forecast, by rank 0, which runs a few rows through a model whose parameters take no memory."""
    bounds, compressed = job.context.stage.bounds, job.policy.compressed
    share = 0.0 if compressed is None else compressed.share

    def predict() -> Any:
        train = config.train
        if config.workers.count:
            from mpitrain.train.build.federation import as_rounds  # few runs are federations
            train = as_rounds(config).train
        placement = place(make_model(config), Grid(session.mesh.lengths), config.mesh, train, config.comm,
                          stages=[b - a for a, b in pairwise(bounds)])
        found = forecast_of(config, placement, session.inputs, share=share, masters=job.policy.masters)
        return [list(map(list, found.stages)), found.why]

    stages, why = on_first(session.control, predict)
    return Forecast([Use(*use) for use in stages], why)


def n_virtual(config: Config) -> int:
    """The number of parts into which the model is cut."""
    return config.mesh.pp * config.mesh.chunks


def before_mpi(action: Callable[[], Any]) -> Callable[[], Any]:
    """Runs `action` now, on the rank that will be 0; the answer gives its value, or raises its error, when called later.

    Files are examined so: their parser is a child process, and nothing forks once MPI has started.
    """
    if launched_rank()[0] != 0:
        return lambda: None
    try:
        value = action()
    except MpitrainError as error:
        kept = error

        def fail() -> Any:
            raise kept
        return fail
    return lambda: value


def told_once(everyone: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Each text of (host, texts) of all ranks once; with the first one's host if they are on several."""
    several = len({host for host, _ in everyone}) > 1
    texts: dict[str, str] = {}
    for host, said in everyone:
        for text in filter(None, said):
            texts.setdefault(text, f"{text} ({host})" if several and host not in text else text)
    return list(texts.values())
