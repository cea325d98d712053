"""What `train` would refuse in every trial of a study is refused before the first of them.

A trial that fails alone ends alone, for its values are to blame. Where the run as it stands cannot begin, and cannot with any
other value either, all trials would fail, one by one: an observer that is not there, a model that does not take the samples, a
batch larger than the data. Whether values count is seen by trying some: each end of a range and each choice by itself, then
points drawn from the whole space. An error that does not change by one word with any of them does not come from them. One that
changes may be cured by a value which was not tried, and the study begins.
"""

from __future__ import annotations

from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.together import on_first
from mpitrain.errors import MpitrainError
from mpitrain.run.run import AsTrial, Run
from mpitrain.search.cost import refuse_too_large
from mpitrain.search.groups import Groups
from mpitrain.search.judged import tried
from mpitrain.search.space import Values
from mpitrain.search.study_file import Study
from mpitrain.search.trial import Job, configured
from mpitrain.train.intervals import Pauses


def refuse_unusable(study: Study, groups: Groups, process: Process) -> None:
    """The error that the run as it stands ends with before its first step, on all ranks, where all values that are tried give the
    same one in all groups. It communicates: each group makes a run, or several, and trains none."""
    error = _failure(study, {}, groups, process)
    same = error is not None and all(_same(groups, error, _failure(study, values, groups, process)) for values in tried(study))
    everywhere = all(groups.whole.control.gather_objects(same))
    with guard.symmetric():
        if error is not None and everywhere:
            raise type(error)(f"no trial of this study can begin, whatever its values: {error.message}", code=error.code,
                              file=error.file, dataset=error.dataset, row=error.row, offset=error.offset)


def _same(groups: Groups, error: MpitrainError, other: MpitrainError | None) -> bool:
    """Whether two errors are one to this group; its first rank decides, since others may have it in other words."""
    answer = other is not None and (other.code, str(other)) == (error.code, str(error))
    return bool(groups.session.control.broadcast_object(answer))


def _failure(study: Study, values: Values, groups: Groups, process: Process) -> MpitrainError | None:
    """What a run of these values is refused with, on all ranks of the group. It communicates."""
    run: Run | None = None
    session = groups.session
    try:
        with guard.symmetric():
            config = configured(study, Job(0, values, 0), groups.threads)
        on_first(session.control, lambda: refuse_too_large(config, groups.whole.inputs, session.mesh.lengths, groups.room))
        run = Run(config, groups.comm, process=process, quiet=True, after=session)
        with run:
            run.rehearse(AsTrial(lambda plan: Pauses()))
    except MpitrainError as error:
        if groups.comm.size > 1 and not guard.is_symmetric(error):
            raise
        if run is not None:
            run.close()
        return error
    return None
