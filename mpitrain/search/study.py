"""A study on all ranks of a job: groups that take the next trial from the table until there is none.

    each group      ask: tell the outcome, decide what is next  ->  train  ->  ask  ->  train  ...  ->  nothing is left
    first ranks     the table, by way of the journal on the disk: `search.shared_table`. There is no master
    all ranks       meet at the end; rank 0 writes study.json and best.toml
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from mpitrain.comm.face import Objects
from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.together import on_first
from mpitrain.config import changed, to_toml
from mpitrain.config.messages import toml
from mpitrain.errors import OutputError, Stopped, print_warning
from mpitrain.registry import Registry
from mpitrain.run.limits import agree
from mpitrain.run.run import Run
from mpitrain.run.session import before_mpi, look_at_files
from mpitrain.search.cost import Costs, refuse_unknown_joules, refuse_without_joules
from mpitrain.search.folder import StudyFolder
from mpitrain.search.groups import Groups
from mpitrain.search.judged import refuse_choices
from mpitrain.search.pruners import Done, Promote, Start
from mpitrain.search.rehearsal import refuse_unusable
from mpitrain.search.shared_table import SharedTable, wait_for_more
from mpitrain.search.spent import spent_of
from mpitrain.search.study_file import Study, refuse_unbuildable
from mpitrain.search.summary import begun, summary
from mpitrain.search.table import Record, Table, lost_jobs
from mpitrain.search.trial import Job, TrialRuns

Told = Callable[[Record, Table], object]
GROUPS: Registry[Any] = Registry("work of a group")
"""What a group of ranks does in a study: one trial after the other, or a member of a population from start to end."""
GROUPS.register_later("population", "mpitrain.search.members:Population")


def search(study: Study, process: Process, *, resume: bool = False, overwrite: bool = False,
           told: Told = lambda record, table: None) -> dict[str, Any]:
    """Runs a study, or goes on with it (`resume`), on all ranks of the job, and returns study.json. It starts MPI.

    `told` hears on rank 0 of each record of the journal, in its order. NumericsError where all trials have failed; Stopped where
    the job was asked to stop: `resume` goes on.
    """
    with guard.symmetric():
        refuse_without_joules(study.objectives, study.base)
    base = study.base
    files = before_mpi(partial(look_at_files, base))
    groups = Groups(Run.of_job(base, process, quiet=True, look=files).comm, base, study.search.ranks, files,
                    process.pulse)
    agree(base, groups.whole.control, groups.whole.places, process)
    refuse_unknown_joules(study.objectives, base, groups.whole.control, groups.whole.places)
    with guard.symmetric():
        refuse_unbuildable(study, groups.whole.inputs)
        refuse_choices(study, groups.whole.inputs)
    if not resume:                                            # trials of one that goes on have begun
        refuse_unusable(study, groups, process)
    with ExitStack() as cleanup:
        folder = StudyFolder(study.folder)
        on_first(groups.whole.control, lambda: prepare(study, folder, groups, resume=resume, overwrite=overwrite))
        if groups.world.rank == 0:
            cleanup.callback(folder.close)
        cleanup.enter_context(process.recording(folder.path))
        refuse_unshared(folder.journal.path, groups.whole.control, [place.host for place in groups.whole.places])
        group = GROUPS["population" if study.search.population else "trials"](study, groups, folder, process, told)
        group.work()
        found: dict[str, Any] = group.end()
        groups.close()
    return found


def prepare(study: Study, folder: StudyFolder, groups: Groups, *, resume: bool, overwrite: bool) -> None:
    """Rank 0 takes the folder and begins the journal, or goes on with the one that is there."""
    folder.begin(resume=resume, overwrite=overwrite)
    try:
        journal = folder.journal
        if resume:
            records, said = journal.read()
            if said:
                print_warning(said)
            journal.mend()
            study.refuse_other(records[0], journal.path)
            decisions = study.decisions()
            for record in records[1:]:
                decisions.apply(record)
            journal.append(begun(groups), *lost_jobs(decisions.table))
        else:
            journal.create(study.header())
            journal.append(begun(groups))
        folder.write_text(folder.config, to_toml(study.base))
    except BaseException:
        folder.close()
        raise


def refuse_unshared(journal: Path, control: Objects, hosts: Sequence[str]) -> None:
    """OutputError, on all ranks, where some hosts see another folder than rank 0. It communicates."""
    sees = control.gather_objects(journal.is_file())
    with guard.symmetric():
        if not all(sees):
            without = ", ".join(sorted({host for host, there in zip(hosts, sees) if not there}))
            raise OutputError(f"the groups of a study share its folder, and {without} cannot see the journal that {hosts[0]} has "
                              "begun; set run.out to a folder in a file system that all hosts share", file=journal)


@GROUPS.register("trials")
class Group:
    """One group of a job's ranks at work on a study."""

    def __init__(self, study: Study, groups: Groups, folder: StudyFolder, process: Process, told: Told):
        self.study, self.groups, self.folder, self.process = study, groups, folder, process
        whole = groups.whole
        hosts = [place.host for place in whole.places]
        share = hosts[:groups.comm.size].count(hosts[0]) / hosts.count(hosts[0])
        costs = Costs(study.objectives, whole.inputs, share)
        self.runs = TrialRuns(study, groups, process, costs, groups.room, self.ask)
        self.stopped = False
        self.table: SharedTable | None = None                 # of the group's first rank
        if groups.is_first:
            hears = told if groups.world.rank == 0 else lambda record, table: None
            self.table = SharedTable(study.decisions(), folder.journal, hears, groups.rest)
            self.table.catch_up()

    def work(self) -> None:
        """Trains one trial after the other until the study has none for this group."""
        try:
            job = self.ask()
            while job is not None:
                job = self.runs.train(job)
        except Stopped:
            self.stopped = True                               # the trial has saved; what is running is lost, and goes on later
            if self.table is not None:
                self.table.add({"kind": "job", "event": "stops", "time": time.time()})

    def ask(self, outcome: Callable[[], Record] | None = None) -> Job | None:
        """Tells the outcome of a trial, which the group's first rank makes, and gives the next job; None where nothing is left.
        It communicates, and waits while the study needs the results of other groups."""
        while True:
            began = time.perf_counter()
            answer = self._ask(outcome)
            outcome = None
            if answer == "wait":
                self._wait()
                self.runs.clock.waited += time.perf_counter() - began
                continue
            return None if answer is None else Job(*answer)

    def _ask(self, outcome: Callable[[], Record] | None) -> Any:
        def decide() -> Any:
            assert self.table is not None
            action = self.table.next(*([outcome()] if outcome is not None else []))
            if isinstance(action, Start | Promote):
                return [action.trial.id, action.trial.values, action.rung]
            return None if isinstance(action, Done) else "wait"
        try:
            return on_first(self.groups.session.control, decide)
        except Exception as error:
            error.of_study = True                             # type: ignore[attr-defined]
            raise

    def _wait(self) -> None:
        """Sleeps until another group has written something; all ranks do, for one that waits in MPI takes a core."""
        offset = on_first(self.groups.session.control, lambda: None if self.table is None else self.table.offset)
        wait_for_more(self.folder.journal.path, offset, self.groups.rest)

    def end(self) -> dict[str, Any]:
        """What rank 0 writes when all groups have come to their end, on all ranks. It communicates."""
        self.groups.meet()
        control = self.groups.whole.control
        stopped = any(control.gather_objects(self.stopped))

        def write() -> dict[str, Any]:
            assert self.table is not None
            self.table.catch_up()
            found = summary(self.study, self.table, self.groups, stopped=stopped)
            spent = spent_of(self.folder.path, self.table.decisions.table.trials, self.study.base)
            if spent is not None:
                found["privacy"] = spent
                self.folder.write_json(self.folder.spent, spent)
            self.folder.write_json(self.folder.study, found)
            self._write_best()
            self.table.decisions.table.refuse_all_failed()
            return found
        found: dict[str, Any] = on_first(control, write)
        if stopped:
            raise Stopped("the study has stopped on request; its trials have saved: go on with search --resume")
        return found

    def _write_best(self) -> None:
        """best.toml: the best trial as a run of its own."""
        assert self.table is not None
        study, best = self.study, self.table.decisions.table.best()
        if best is not None:
            config = changed(study.config_with(best.values), train={"threads": self.groups.threads},
                             run={"name": f"{study.base.run.name}-best", "out": f"{study.base.run.out}-best"})
            how = f"mpirun -n {self.groups.comm.size} python -m mpitrain train {self.folder.best}"
            self.folder.write_text(self.folder.best, f"# Trial {best.id} of {study.file.name}: {how}\n{to_toml(config)}")


def best_of(found: Mapping[str, Any]) -> str:
    """The best trial of a study.json in a line."""
    best = found["best"]
    if best is None:
        return "no trial has a result"
    values = ", ".join(f"{key} = {toml(value)}" for key, value in best["values"].items())
    return f"best: trial {best['trial']} ({values})"
