"""A saved model with adapters: these alone in a folder, put on their base again, or added to the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mpitrain.checkpoint import store
from mpitrain.checkpoint.hashes import array_line, total_sha256
from mpitrain.checkpoint.parts import Piece
from mpitrain.errors import CheckpointError, OutputError
from mpitrain.train.build.adapters import is_new, without
from mpitrain.train.build.model import make_model
from mpitrain.train.build.saved import SavedModel, naming_out

ADAPTER = store.Purpose("taking the adapters of", "there is no checkpoint of adapters; make one with mpitrain adapter")


def plain_model(saved: SavedModel) -> SavedModel:
    """The saved model with its adapters added to its weights, and without them."""
    from mpitrain.shrink.lora import merge
    made = saved.made_into(saved.model, **without(saved.config))
    plain = make_model(made.config)
    plain.initialize(saved.config.run.seed, saved.config.train.precision)
    merge(saved.model, plain)
    return made.made_into(plain.eval().requires_grad_(False))


def write(folder: Path, saved: SavedModel) -> dict[str, Any]:
    """Writes a folder with a checkpoint of the adapters alone; what it says of them, with the hash of all other parameters.

    OutputError where the folder has something in it.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError("the folder is not empty; set --out to another", file=folder)
    new = is_new(saved.config)
    values = {name: leaf.numpy() for name, leaf in saved.model.named_parameters()}
    a = saved.config.lora
    about = {"rank": a.rank, "alpha": a.alpha, "layers": list(a.layers),
             "base_sha256": total_sha256(array_line(name, array) for name, array in values.items() if not new(name))}
    with naming_out():
        store.save(folder, saved.step, [Piece.whole(f"parameters/{name}", array) for name, array in values.items() if new(name)],
                   {"adapter": about})
    return about


def with_adapter(base: SavedModel, folder: Path) -> SavedModel:
    """A saved model with the adapters of a folder that `write` made. CheckpointError for those of another base."""
    found = store.latest(folder, purpose=ADAPTER)
    about = found.meta.get("adapter")
    if not (isinstance(about, dict) and set(about) == {"rank", "alpha", "layers", "base_sha256"}):
        raise CheckpointError("the checkpoint is not one of adapters alone; make one with mpitrain adapter", file=found.folder)
    own = base.hashes()["parameters_sha256"]
    if about["base_sha256"] != own:
        raise CheckpointError(f"the adapters are of a base with parameters_sha256 {str(about['base_sha256'])[:12]}.., found "
                              f"{own[:12]}..; give the run that they were trained from, whose other parameters stayed frozen",
                              file=found.folder)
    made = base.made_into(base.model, lora={"rank": about["rank"], "alpha": about["alpha"], "layers": tuple(about["layers"])})
    model = make_model(made.config)
    model.initialize(base.config.run.seed, base.config.train.precision)
    values = {name: leaf.numpy() for name, leaf in (*base.model.named_parameters(), *base.model.named_buffers())}
    leaves = [*model.named_parameters(), *model.named_buffers()]
    found.check_names({f"parameters/{name}": (leaf.shape, leaf.dtype) for name, leaf in leaves if name not in values})
    for name, leaf in leaves:
        leaf.array[...] = values[name] if name in values else found.read(f"parameters/{name}")
        leaf.mark_changed()
    return replace(made.made_into(model.eval().requires_grad_(False)), sources=(*base.sources, folder))
