"""A run that goes on: is the checkpoint its own, and is the run still the same experiment?"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from mpitrain.checkpoint import folders
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.comm.job.together import on_first
from mpitrain.config import Config
from mpitrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DesyncError,
    OtherModelError,
    OutputError,
    name_and_text,
    print_warning,
)
from mpitrain.run.session import Session
from mpitrain.train.build import experiment
from mpitrain.train.build.experiment import DATA, NUMERICS, Change, RateOf

NOT_COMPARED = "the checkpoint was written before runs kept a record of their experiment: not compared"
STATE = ("model.", "optimizer.", "shrink.", "lora.", "train.precision")     # changes of these change the arrays of a checkpoint
TO_EVALUATE = ("run.seed", "model.block", DATA)          # changes of these and of [data] change the rows that are evaluated


def begin(mine: Mapping[str, Any]) -> dict[str, Any]:
    """What a new run keeps in run.json and in its checkpoints: an id of its own, and the record of its experiment."""
    return {"id": secrets.token_hex(8), "experiment": dict(mine), "changes": []}


def go_on(run_json: Mapping[str, Any], found: Checkpoint, mine: Mapping[str, Any], rate: RateOf, *, allowed: Sequence[str],
          strict: bool) -> list[Any]:
    """What the run keeps from now on, and lines that tell what has changed since the checkpoint. Rank 0 calls it.

    `run_json` is what the run folder says of its run. ConfigError, or DataError, for changes of which rows a step sees that are
    not `allowed`. `strict`: for any change, and CheckpointError for a checkpoint without a record.
    """
    kept = begin(mine)
    kept["id"] = found.meta.get("id") or run_json.get("id") or kept["id"]
    if found.meta.get("experiment") is None:
        if strict:
            raise CheckpointError(f"--strict: {NOT_COMPARED}", file=found.folder)
        return [kept, [NOT_COMPARED]]
    changes, earlier = since(found, mine, rate), found.meta.get("changes", [])
    if not isinstance(earlier, list):
        raise CheckpointError("its list of changes is damaged; use another checkpoint", file=found.folder)
    refuse([change for change in changes if (change.moves_rows or strict) and change.key not in allowed], found, strict)
    kept["changes"] = [*earlier, *({"step": found.step, "key": change.key, "was": change.was,
                                                          "is": change.now} for change in changes)]
    return [kept, [change.text for change in changes]]


def refuse_other(run_json: Mapping[str, Any], found: Checkpoint, files: Mapping[str, Any], *, allowed: Sequence[str]) -> None:
    """CheckpointError for another run's checkpoint, DataError for data other than its run's.

    Rank 0 calls it before anything reads these data: a header that was damaged may point to any values.
    """
    refuse_foreign(run_json, found)
    if found.meta.get("experiment") is not None and DATA not in allowed:
        with readable(found):
            changes = experiment.changes_of_data(found.meta["experiment"], {"data": experiment.identities(files)})
        refuse(changes, found)


def since(found: Checkpoint, mine: Mapping[str, Any], rate: RateOf) -> list[Change]:
    """What differs between the checkpoint's record and a run's own. CheckpointError for a record that is none."""
    with readable(found):
        return experiment.changes(found.meta["experiment"], mine, found.step, rate)


@contextmanager
def readable(found: Checkpoint) -> Iterator[None]:
    """What is wrong with the record of an untrusted checkpoint is its damage, and no bug."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"its record of the experiment is damaged: {name_and_text(error)}; use another checkpoint",
                              file=found.folder) from None


def refuse_foreign(run_json: Mapping[str, Any], found: Checkpoint) -> None:
    """CheckpointError if the checkpoint says that it is another run's than that of its folder."""
    own, other = run_json.get("id"), found.meta.get("id")
    if run_json and other is not None and other != own:
        raise CheckpointError(f"the checkpoint is of another run (its id is {other}, this run's {own or 'unknown'}); move it out "
                              "of this folder, or start a run of its own from it with model.init_from", file=found.folder)


def refuse(changes: Sequence[Change], found: Checkpoint, strict: bool = False) -> None:
    """Raises one error that lists these changes and says how to allow them."""
    if not changes:
        return
    keys = list(dict.fromkeys(change.key for change in changes))
    kind, code = (DataError, "E_DATA_CHANGED") if keys == [DATA] else (DesyncError, None) if keys == [NUMERICS] else \
        (ConfigError, None)
    how = " ".join(f"--change {key}" for key in keys)
    raise kind(f"{'--strict: ' if strict else ''}the run is not the experiment of its checkpoint: "
               f"{'; '.join(change.text for change in changes)}; take it back, or allow it with {how}", code=code,
               file=found.folder)


@contextmanager
def blaming(changes: Sequence[Mapping[str, Any]], told: Sequence[str]) -> Iterator[None]:
    """An OtherModelError inside begins with the changed keys that are why; `told` has the lines of the last of `changes`."""
    try:
        yield
    except OtherModelError as error:
        why = [text for change, text in zip(reversed(changes), reversed(told))
               if change["key"].startswith(STATE)]
        raise OtherModelError(": ".join(["; ".join(reversed(why)), error.message] if why else [error.message]),
                              file=error.file) from error


def numerics_changed(texts: Sequence[str], found: Checkpoint, *, allowed: Sequence[str], strict: bool) -> list[dict[str, Any]]:
    """Entries of "changes" for other numerics, or another way of summing gradients. DesyncError for them if it is `strict`."""
    if strict and NUMERICS not in allowed:
        refuse([Change(NUMERICS, None, text, False, text) for text in texts], found, strict)
    return [{"step": found.step, "key": NUMERICS, "was": None, "is": text} for text in texts]


def tell_other_rows(config: Config, session: Session, folder: RunFolder, found: Checkpoint) -> None:
    """Says why the rows to evaluate are not those of the run; CheckpointError for another run's checkpoint. It communicates."""
    about = session.describe(config)

    def no_rate(steps: int) -> NoReturn:
        raise AssertionError("the length of the run is the checkpoint's own")

    def tell() -> None:
        refuse_foreign(folder.about(), found)
        was = found.meta.get("experiment")
        if was is None:
            return
        with readable(found):
            mine = experiment.record(config, session.files, about, was["steps"])
        with readable(found):
            experiment.refuse_other_names_than(was, session.files)
        for change in since(found, mine, no_rate):
            if change.moves_rows and (change.key in TO_EVALUATE or change.key.startswith("data.")):
                print_warning(change.text)
    on_first(session.control, tell)


def open_folder(folder: RunFolder, resume: str | None, overwrite: bool) -> None:
    """Takes the run folder. OutputError if there is nothing where a run should be."""
    if resume == "latest" and not folder.path.exists():
        raise OutputError("there is no run to resume in this folder; start it without --resume", file=folder.path)
    folder.open(resume=resume is not None, overwrite=overwrite)


def continues(folder: RunFolder, resume: str | None) -> bool:
    """Whether there is a run to continue, and continuing is wanted."""
    return resume is not None and (resume != "auto" or bool(folders.candidates(folder.checkpoints, links=True)))
