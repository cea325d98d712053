"""A trained model outside a run: whole, in one process, without MPI; and a run folder made from one.

    saved = load("runs/gpt")                      # the newest checkpoint; or step=1200, or step="best"
    saved.model, saved.config, saved.transforms
    save(Path("runs/gpt-int8"), saved.with_config(...), made={"by": "quantize", ...})

What is written is a run as any other: `evaluate`, `inspect`, `predict` and `train model.init_from=` take it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain import data, nn
from mpitrain.autograd import no_grad
from mpitrain.checkpoint import choosing, store
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.checkpoint.state import State
from mpitrain.config import Config, changed, load_run, to_toml
from mpitrain.errors import MpitrainError, OutputError, UsageError
from mpitrain.train.build.model import make_model

USE = store.Purpose("taking the model of", "there is no checkpoint to take the model from; train the run until it has saved one")
ADVICE = "--overwrite deletes the run that is there; or set --out to another folder"


@dataclass(frozen=True)
class SavedModel:
    """The model of one checkpoint of a run, in eval mode, its parameters not trained; `meta` is what the checkpoint says of its
    run."""

    model: nn.Module
    config: Config
    step: int
    transforms: data.Transforms
    meta: Mapping[str, Any]
    sources: tuple[Path, ...] = ()           # folders and files that it was read from, which `save` leaves as they are

    def state(self) -> State:
        """The named arrays of the model and of its data's transforms."""
        return State(self.model, None, self.transforms)

    def hashes(self) -> dict[str, str]:
        """``parameters_sha256`` and ``buffers_sha256``, as in run.json."""
        return self.state().hashes()

    def made_into(self, model: nn.Module, /, **sections: Mapping[str, Any]) -> SavedModel:
        """Another model made from this one, and keys of the configuration: ``made_into(model, model={"widths": [3, 8]})``."""
        return dataclasses.replace(self, model=model, config=changed(self.config, **sections))


def load(folder: str | os.PathLike[str], step: int | str | None = None, overrides: Sequence[str] = ()) -> SavedModel:
    """The model of a run folder: of its newest checkpoint, of a step, or of the "best" validation loss.

    `overrides` are ``section.key=value``. Raises MissingError, CheckpointError and ConfigError, which name the file or the key.
    """
    if not (step is None or step == choosing.BEST or (type(step) is int and step >= 0)):
        raise UsageError(f'step is a number of 0 or more, "best", or None for the newest checkpoint; found {step!r}')
    path = Path(folder)
    config = load_run(path, list(overrides))
    found = choosing.chosen(path / "checkpoints", step, purpose=USE)
    model = make_model(config)
    model.initialize(config.run.seed, config.train.precision)
    d = config.data
    transforms = data.Transforms(d.transform, config.folder, d.target_transform, by_step=d.length > 0)
    with no_grad():
        State(model, None, transforms).restore(found)
    return SavedModel(model.eval().requires_grad_(False), config, found.step, transforms, found.meta,
                      (path,))


def save(folder: str | os.PathLike[str], saved: SavedModel, made: Mapping[str, Any], *, overwrite: bool = False) -> Path:
    """Writes a run folder with this model as its one checkpoint; its path. `made` says in run.json what it was made by and of.

    OutputError where the folder has something in it and is not to be overwritten, and where it is, has or lies in one that the
    model was read from.
    """
    refuse_sources(Path(folder), saved.sources)
    state = saved.state()
    state.refuse_nonfinite(saved.step, "nothing was written; take a file or a checkpoint whose numbers are")
    with naming_out(), contextlib.closing(RunFolder(folder).open(overwrite=overwrite, advice=ADVICE)) as out:
        kept = {key: saved.meta[key] for key in ("seed", "experiment") if key in saved.meta}
        kept["id"] = secrets.token_hex(8)
        model = {"name": saved.config.model.name, **saved.config.model.arguments}
        store.save(out.checkpoints, saved.step, state.pieces(), {**kept, "model": model, "made": dict(made)})
        out.write_text(out.config, to_toml(changed(saved.config, run={"out": str(folder)})))
        out.write_json(out.run_json, {"id": kept["id"], "name": saved.config.run.name, "status": "made", "steps": saved.step,
                                      "made": dict(made), **state.hashes()})
    return out.path


@contextlib.contextmanager
def naming_out() -> Iterator[None]:
    """Errors of the files below name the flag that says the folder here, in place of the key that says a run's."""
    try:
        yield
    except MpitrainError as error:
        error.args = (error.message.replace("set run.out to", "set --out to"), *error.args[1:])
        raise


def refuse_sources(out: Path, sources: Sequence[Path]) -> None:
    """OutputError where writing to `out` could touch what is read: a source, or its checkpoints, by whatever links they are
    reached."""
    whole = Path(os.path.realpath(out))
    for source in sources:
        for read in (source, source / "checkpoints"):
            real = Path(os.path.realpath(read))
            if whole in (real, *real.parents) or os.path.isdir(read) and real in whole.parents:
                how = "is" if whole == real else "has in it" if whole in real.parents else "lies in"
                raise OutputError(f"the folder to write {how} what the model is read from, {read}, which would be lost; "
                                  "set --out to a folder of its own beside it", file=out)
