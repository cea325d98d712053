"""A population at work: each group of ranks trains one member, and after some epochs all meet and exchange weights.

    train and save  ->  meet: results to the journal  ->  who takes whose weights, to the journal  ->  messages between groups
                    ->  who has new weights saves them as the checkpoint of the same step  ->  meet: "exchanged", to the journal

Whatever moment a job is killed at, the journal says which of these is done, and the checkpoints hold what the rest needs: who gives
weights keeps his, and nobody goes on before all have saved. So a study that goes on ends as one that was not interrupted.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from mpitrain.comm.job import guard
from mpitrain.comm.job.failure import describe
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.together import on_first
from mpitrain.config import Config, changed
from mpitrain.config.messages import toml
from mpitrain.errors import ConfigError, MeshError, MpitrainError, Stopped
from mpitrain.placement.shard_cuts import probe
from mpitrain.run.run import Run, Trained
from mpitrain.run.session import Session
from mpitrain.search.exchange import Exchange
from mpitrain.search.folder import StudyFolder
from mpitrain.search.groups import Groups
from mpitrain.search.population import draws, exchange_of, exploit, explored, pairs, winners
from mpitrain.search.space import Values
from mpitrain.search.study import Group, Told
from mpitrain.search.study_file import Study
from mpitrain.search.table import PAUSED, Record
from mpitrain.search.trial import Job, TrialRuns, configured
from mpitrain.train.build.assembly import Job as Built
from mpitrain.train.build.evaluation import make_evaluator
from mpitrain.train.build.from_config import describe as described
from mpitrain.train.build.from_config import make_metrics
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.sizes import with_sizes
from mpitrain.train.build.trial import try_samples
from mpitrain.train.intervals import Pauses, Plan

EXCHANGED = "exchanged"


class MemberRun(Run):
    """A run whose parts can be had while it trains."""

    built: Built
    inputs: Inputs                           # whose transforms have learned what they need

    def _fit(self, session: Session, job: Built, *rest: Any) -> Trained:
        self.built, self.inputs = job, session.inputs
        return super()._fit(session, job, *rest)


class Population(Group):
    """One group of a job's ranks at work on a member: trial number g is group g's."""

    def __init__(self, study: Study, groups: Groups, folder: StudyFolder, process: Process, told: Told):
        with guard.symmetric():
            refuse_ranks(study, groups)
            refuse_unlike(study, groups.whole.inputs)
        super().__init__(study, groups, folder, process, told)
        self.members, self.rule, self.member = study.search.population, exchange_of(study.search), groups.number
        self.links = Exchange(groups.world, groups.number, groups.comm.rank)
        self.control = groups.whole.control
        self.trains = Members(self, self.runs)
        self.values: list[Values] = []                        # of all members
        self.done = 0                                         # exchanges that all have come through
        self.failed: list[int] = []                           # members that go on no more
        self._agreed = False

    # -- what rank 0 alone does, with the table ------------------------------------------------------------------------

    def _read(self) -> dict[str, Any]:
        """What the journal says; a new one begins with the members."""
        assert self.table is not None
        shared, table = self.table, self.table.decisions.table
        if not table.trials:
            for number in range(self.members):
                values = self.study.sampler.ask(table, number).values
                shared.add({"kind": "start", "trial": number, "rung": 0, "values": values, "time": time.time()})
        shared.add(*({"kind": "again", "trial": trial, "rung": rung}
                     for (trial, rung), state in list(table.open.items()) if state == "lost"))
        done = sum(record.get("event") == EXCHANGED for record in shared.records)
        return {"values": [trial.values for trial in table.trials], "done": done,
                "failed": [trial.id for trial in table.trials if trial.code]}

    def _decided(self, turn: int) -> dict[int, int] | None:
        """Who takes whose weights in a round, where the journal has it whole."""
        assert self.table is not None
        found = {record["trial"]: record["from"] for record in self.table.records
                 if record["kind"] == "exchange" and record["round"] == turn}
        return found if len(found) == len(self._able()) else None

    def _able(self) -> list[int]:
        """The members that have not failed, as far as the table knows."""
        assert self.table is not None
        return [trial.id for trial in self.table.decisions.table.trials if not trial.code]

    def _tell(self, records: list[Record | None]) -> None:
        """Results and failures that are not in the journal yet."""
        assert self.table is not None
        is_open = self.table.decisions.table.open
        self.table.add(*(record for record in records if record and (record["trial"], record["rung"]) in is_open))

    def _decide(self, turn: int, taken: Mapping[int, int]) -> None:
        """Writes who takes whose weights, and with what values each goes on."""
        assert self.table is not None
        table, seed, now = self.table.decisions.table, self.study.seed, time.time()
        records: list[Record] = []
        for member in self._able():
            source = taken.get(member, member)
            values = table.trials[source].values
            if member in taken and self.rule.rule == "pbt":
                values = explored(self.study.space, values, self.rule, seed, turn, member)
            records.append({"kind": "exchange", "trial": member, "values": values, "from": source, "round": turn, "time": now})
        self.table.add(*records)

    def _finish(self, turn: int) -> None:
        assert self.table is not None
        trials = self.table.decisions.table.trials
        go_on = [member for member in self._able() if trials[member].state == PAUSED]        # some may have, and be written
        self.table.add(*({"kind": "promote", "trial": member, "rung": turn + 1} for member in go_on),
                       {"kind": "job", "event": EXCHANGED, "round": turn, "time": time.time()})

    # -- all ranks -----------------------------------------------------------------------------------------------------

    def work(self) -> None:
        found = on_first(self.control, lambda: self._read())
        self.values, self.done, self.failed = found["values"], found["done"], found["failed"]
        try:
            if self.member not in self.failed:
                self.trains.train_on()
            while not self.stopped and self.done < len(self.study.rungs) - 1:      # a member that has failed takes part
                self.meet(self.done, None, None)
            if not self.stopped:
                self.last()
        except Stopped:
            self.leave()
        self.links.close()

    def leave(self) -> None:
        """This group was asked to stop: the others hear of it when they meet, and so do all of its own."""
        self.stopped = True
        self.groups.meet()
        self.control.gather_objects(["stopped", None])

    def gathered(self, record: Record | None) -> list[Record | None] | None:
        """The records of the groups; None where one of them has been asked to stop. It communicates, and sleeps till all come."""
        began = time.perf_counter()
        self.groups.meet()
        self.runs.clock.waited += time.perf_counter() - began
        found = self.control.gather_objects(["", record if self.groups.is_first else None])
        self.stopped = self.stopped or any(status for status, _ in found)
        return None if self.stopped else [one for _, one in found]

    def last(self) -> None:
        """The end of training: the last results."""
        records = self.gathered(self.trains.outcome)
        if records is not None:
            on_first(self.control, lambda: self._tell(records))

    def meet(self, turn: int, record: Record | None, built: Built | None) -> bool:
        """Exchange number `turn`. Whether this member goes on as it is: False where its values are others now, or all stop."""
        records = self.gathered(record)
        if records is None:
            return False
        on_first(self.control, lambda: self._tell(records))
        self._agree(built)
        taken = on_first(self.control, lambda: _pairs(self._decided(turn)))
        if taken is None:
            taken = self._new_decision(turn, built)
        sources = {member: source for member, source in taken if member != source}
        if built is not None:
            self._exchange(sources, built)
        self.groups.meet()
        values = on_first(self.control, lambda: self._through(turn))
        before, self.values, self.done = self.values, values, turn + 1
        return bool(before[self.member] == values[self.member])

    def _through(self, turn: int) -> list[Values]:
        assert self.table is not None
        self._finish(turn)
        return [trial.values for trial in self.table.decisions.table.trials]

    def _agree(self, built: Built | None) -> None:
        """At the first meeting: are the runs alike?"""
        first, self._agreed = not self._agreed, True
        if first and not self.failed and not any(self.control.gather_objects(built is None)):
            assert built is not None
            self.links.agree(self.control, built, f"member {self.member}")

    def _new_decision(self, turn: int, built: Built | None) -> Any:
        """The sources of all members, which the journal has then."""
        self.failed = on_first(self.control, lambda: [m for m in range(self.members) if m not in self._able()])
        able = [member for member in range(self.members) if member not in self.failed]
        seed, judged = self.study.seed, None
        if self.rule.rule == "tournament":
            partners = pairs(able, seed, turn)
            mine = None if built is None or self.member not in partners else self.trains.judge(built, partners[self.member])
            judged = self.control.gather_objects(mine if self.groups.is_first else None)

        def decide() -> Any:
            assert self.table is not None
            if judged is None:
                trials = self.table.decisions.table.trials
                taken = exploit({member: trials[member].score for member in able}, self.rule.quantile, seed, turn)
            else:
                n = self.groups.comm.size
                taken = winners({member: judged[member * n] for member in able}, partners)
            self._decide(turn, taken)
            return _pairs(self._decided(turn))
        return on_first(self.control, decide)

    def _exchange(self, sources: Mapping[int, int], built: Built) -> None:
        """Sends this member's state to those that take it, or takes another's, and saves that."""
        receivers = [member for member, source in sources.items() if source == self.member]
        if receivers:
            self.links.send(built, receivers)
        if self.member in sources:
            self.links.receive(built, sources[self.member])
            built.trainer.checkpoint(built.trainer.update.step, at_once=True)


class Members(TrialRuns):
    """The runs of one group's member, from one exchange to the next, and its outcomes."""

    def __init__(self, population: Population, runs: TrialRuns):
        super().__init__(runs.study, runs.groups, runs.process, runs.costs, runs.room, runs.ask)
        self.population, self.clock = population, runs.clock
        self.outcome: Record | None = None
        self._run: MemberRun | None = None
        self._judges: Any = None

    def train_on(self) -> None:
        """Trains the member to its end. Where it gets other values, its run goes on as another, from the same checkpoint."""
        while self.outcome is None and not self.population.stopped:
            job = Job(self.population.member, self.population.values[self.population.member], self.population.done)
            self._plan = self._run = self._judges = None
            try:
                config = self._config(job)
                self._run = MemberRun(config, self.groups.comm, process=self.process, quiet=True, after=self.groups.session)
                with self._run as run:
                    trained = run.train(resume="auto", observers=[self.clock], change=tuple(self.study.space.dimensions),
                                        pauses=lambda plan: self._meetings(plan, config), alike=self.groups.comm.size > 1)
            except Exception as error:
                self._fails(error)
                return
            if not trained.paused:
                self.outcome = self._record(Job(job.trial, job.values, len(self.study.rungs) - 1), config, trained)

    def _fails(self, error: Exception) -> None:
        code = self._code(error)
        if code is None:
            raise error
        if self._run is not None:
            self._run.close()
        job = Job(self.population.member, {}, self.population.done)
        message = error.message if isinstance(error, MpitrainError) else describe(error).message
        self.outcome = self._failed(job, code, message, getattr(error, "step", None) or 0)
        self.population.failed.append(job.trial)
        last = len(self.study.rungs) - 1
        if self.population.done < last:
            self.population.meet(self.population.done, self.outcome, None)

    def _config(self, job: Job) -> Config:
        config = super()._config(job)
        own = self.population.rule.own_seed
        return changed(config, run={"seed": config.run.seed + job.trial}) if own else config

    def _meetings(self, plan: Plan, config: Config) -> Pauses:
        """The ends of all rungs but the last, where members meet; one that is through already is passed."""
        self._plan = plan
        steps = {epochs * plan.steps_per_epoch: rung for rung, epochs in enumerate(self.study.rungs[:-1])}

        def meets(step: int, metrics: dict[str, float]) -> bool:
            rung, population = steps[step], self.population
            if rung < population.done:
                return True
            assert self._run is not None
            job = Job(population.member, population.values[population.member], rung)
            self.clock.close()
            record = self._record(job, config, Trained(step, metrics, {}, paused=True))
            try:
                goes_on = population.meet(rung, record, self._run.built)
            except Exception as error:
                error.of_study = True                         # type: ignore[attr-defined]
                raise
            self.clock.begin(self._run.built.trainer)         # type: ignore[arg-type]
            return goes_on
        return Pauses(list(steps), meets)

    def _record(self, job: Job, config: Config, trained: Trained) -> Record | None:
        return on_first(self.groups.session.control, lambda: self._reached(job, config, trained))

    def judge(self, built: Built, partner: int) -> tuple[float, float] | None:
        """How good this member's model is on its tournament rows, and its partner's, by the study's first objective; larger is
        better. The run has its own state afterwards. It communicates."""
        objective = self.study.objectives[0]
        if self._judges is None:
            assert self._run is not None
            self._judges = _tournament(built, self._run.inputs, self.population)
        mine = self._judges.run()[objective.name]
        own = self.population.links.swap(built, partner)
        theirs = self._judges.run()[objective.name]
        self.population.links.put_back(built, own)
        sign = 1.0 if objective.higher else -1.0
        return (sign * mine, sign * theirs) if mine - mine == theirs - theirs == 0 else None


def _tournament(built: Built, inputs: Inputs, population: Population) -> Any:
    """The evaluator of a member's tournament rows: each N-th of the validation rows."""
    evaluator, config = built.trainer.evaluator, built.config
    assert evaluator is not None
    with guard.symmetric():
        rows = inputs.validation_rows[population.member::population.members]
        if not len(rows):
            raise ConfigError(f"a tournament of {population.members} members judges on validation rows, a part each, and there are "
                              f"{len(inputs.validation_rows)}; give more")
        own = dataclasses.replace(inputs, validation_rows=rows)
        tried = try_samples(evaluator.inference, evaluator.loss, own, built.context.placement, built.context.output_shape)
        return make_evaluator(evaluator.inference, evaluator.loss, own, built.context, make_metrics(config), tried,
                              cuts_parameters=built.policy.cuts_parameters, dtype=built.policy.layout.dtype, span=built.timeline.span)


def _pairs(found: Mapping[int, int] | None) -> list[list[int]] | None:
    """Plain data of a decision, which JSON keeps."""
    return None if found is None else [[member, source] for member, source in found.items()]


def refuse_ranks(study: Study, groups: Groups) -> None:
    """MeshError unless each member has a group."""
    n, each, have = study.search.population, study.search.ranks, groups.count * study.search.ranks
    if groups.count != n:
        raise MeshError(f"search.population = {n} x search.ranks = {each} needs {n * each} ranks, but mpirun started {have}; set "
                        f"search.population = {groups.count} or run with -n {n * each}")


def refuse_unlike(study: Study, inputs: Any) -> None:
    """ConfigError for a key of [space] that would give members other arrays, rows or lengths, so that they could not exchange
    their weights; and for a tournament of what is no metric."""
    base = _likeness(study.base, inputs)
    for key, value in study.space.ends():
        for what, (own, other) in _differences(base, _likeness(study.config_with({key: value}), inputs)).items():
            raise ConfigError(f'[space] "{key}" = {toml(value)}: members of a population exchange their weights, and {what} would '
                              f"be {other} there, {own} in the run as it stands; take the key out of [space]", file=study.file)
    exchange, objective = exchange_of(study.search), study.objectives[0]
    if exchange.rule == "tournament" and (objective.text.startswith("-") or inputs.validation is None):
        raise ConfigError(f'search.exchange.rule = "tournament" judges by a metric on validation rows, found objective '
                          f'"{objective.text}"; name a metric first, and set data.validation', file=study.file)


def _likeness(config: Config, inputs: Any) -> dict[str, Any]:
    """What members have alike: the lengths of their runs, the rows of each step, the shapes of all state."""
    config = with_sizes(config, inputs)
    made, t = described(config, inputs.tokens, inputs), config.train
    optimizer = made.optimizer(probe())
    return {"train.batch_size": t.batch_size, "train.micro_batches": t.micro_batches, "train.precision": t.precision,
            "run.seed": config.run.seed, "the model": type(made.model).__name__,
            **{f'the shape of "{name}"': list(leaf.shape)
               for name, leaf in (*made.model.named_parameters(), *made.model.named_buffers())},
            f"the optimizer's state": [optimizer.title, *optimizer.state]}


def _differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (own.get(name), other.get(name)) for name in dict.fromkeys((*own, *other)) if own.get(name) != other.get(name)}
