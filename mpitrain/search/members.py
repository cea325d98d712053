"""A population at work: each group of ranks trains one member, and after some epochs all meet and exchange weights.

    train and save  ->  meet: results to the journal  ->  who takes whose weights, to the journal  ->  messages between groups
                    ->  who has new weights saves them as the checkpoint of the same step  ->  meet: "exchanged", to the journal

A member that has failed on its way to a meeting comes there with a run that has trained nothing, and takes the weights of another
(with rule "pbt", where one has a score): Jaderberg et al. count it as the worst.

Whatever moment a job is killed at, the journal says which of these is done, and the checkpoints hold what the rest needs: who
gives weights keeps his, and nobody goes on before all have saved. So a study that goes on ends as one that was not interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.together import on_first
from mpitrain.errors import Stopped, print_warning
from mpitrain.search.alike import refuse_ranks, refuse_unlike
from mpitrain.search.exchange import Exchange
from mpitrain.search.folder import StudyFolder
from mpitrain.search.groups import Groups
from mpitrain.search.member import Members
from mpitrain.search.population import exchange_of, exploit, explored, pairs, winners
from mpitrain.search.space import Values
from mpitrain.search.study import Group, Told
from mpitrain.search.study_file import Study
from mpitrain.search.table import PAUSED, Record
from mpitrain.train.build.assembly import Job

EXCHANGED = "exchanged"


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
        self.failed: list[int] = []                           # members that have failed, and not got the weights of another
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
        records = [record for record in self.table.records if record["kind"] == "exchange" and record["round"] == turn]
        found = {record["trial"]: record["from"] for record in records}
        able = len(self._able())
        return found if len(found) == (records[0].get("of", able) if records else able) else None      # "of" is newer than some

    def _able(self) -> list[int]:
        """The members that have not failed, as far as the table knows."""
        assert self.table is not None
        return [trial.id for trial in self.table.decisions.table.trials if not trial.code]

    def _tell(self, records: list[Record | None]) -> None:
        """Results and failures that are not in the journal yet."""
        assert self.table is not None
        is_open = self.table.decisions.table.open
        for record in records:
            if record is not None and "unknown" in record:
                print_warning(f"member {record['trial']}: {record['unknown']}; it counts as the worst")
        self.table.add(*(record for record in records if record and (record["trial"], record["rung"]) in is_open))

    def _decide(self, turn: int, taken: Mapping[int, int]) -> None:
        """Writes who takes whose weights, and with what values each goes on."""
        assert self.table is not None
        table, seed, now = self.table.decisions.table, self.study.seed, time.time()
        records: list[Record] = []
        able = sorted({*self._able(), *taken})
        for member in able:
            source = taken.get(member, member)
            values = table.trials[source].values
            if member in taken and self.rule.rule == "pbt":
                values = explored(self.study.space, values, self.rule, seed, turn, member)
            records.append({"kind": "exchange", "trial": member, "values": values, "from": source, "round": turn,
                            "of": len(able), "time": now})
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
            self.trains.train_on()
            while not self.stopped and self.done < len(self.study.rungs) - 1:      # a member that has failed takes part
                self.meet(self.done, self.trains.outcome, None)
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

    def meet(self, turn: int, record: Record | None, built: Job | None) -> bool:
        """Exchange number `turn`. Whether this member goes on as it is: False where its values are others now, or all stop."""
        records = self.gathered(record)
        if records is None:
            return False
        on_first(self.control, lambda: self._tell(records))
        runs, each = self.control.gather_objects(built is not None), self.groups.comm.size
        there = [member for member in range(self.members) if runs[member * each]]
        self._agree(built, everyone=len(there) == self.members)
        taken = on_first(self.control, lambda: _pairs(self._decided(turn)))
        if taken is None:
            taken = self._new_decision(turn, built, there)
        sources = {member: source for member, source in taken if member != source}
        self.failed = [member for member in self.failed if member not in sources]
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

    def _agree(self, built: Job | None, *, everyone: bool) -> None:
        """At the first meeting to which everyone comes with a run: are the runs alike?"""
        if everyone and not self._agreed:
            self._agreed = True
            assert built is not None
            self.links.agree(self.control, built, f"member {self.member}")

    def _new_decision(self, turn: int, built: Job | None, there: Collection[int]) -> Any:
        """The sources of all members, which the journal has then; those `there` have a run that can take weights."""
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
                trials, lost = self.table.decisions.table.trials, [member for member in self.failed if member in there]
                taken = exploit({member: trials[member].score for member in (*able, *lost)}, self.rule.quantile, seed, turn, lost)
            else:
                n = self.groups.comm.size
                taken = winners({member: judged[member * n] for member in able}, partners)
            self._decide(turn, taken)
            return _pairs(self._decided(turn))
        return on_first(self.control, decide)

    def _exchange(self, sources: Mapping[int, int], built: Job) -> None:
        """Sends this member's state to those that take it, or takes another's, and saves that."""
        receivers = [member for member, source in sources.items() if source == self.member]
        if receivers:
            self.links.send(built, receivers)
        if self.member in sources:
            self.links.receive(built, sources[self.member])
            built.trainer.checkpoint(built.trainer.update.step, at_once=True)


def _pairs(found: Mapping[int, int] | None) -> list[list[int]] | None:
    """Plain data of a decision, which JSON keeps."""
    return None if found is None else [[member, source] for member, source in found.items()]
