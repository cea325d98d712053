"""A saved model with adapters: these alone in a folder, put on their base again, or added to the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpitrain import nn
from mpitrain.checkpoint import store
from mpitrain.checkpoint.hashes import array_line, total_sha256
from mpitrain.checkpoint.parts import Piece
from mpitrain.errors import CheckpointError, OutputError, UsageError
from mpitrain.optim.groups import group_of
from mpitrain.train.build.adapters import is_new, without
from mpitrain.train.build.from_config import groups_of
from mpitrain.train.build.model import make_model
from mpitrain.train.build.saved import SavedModel, naming_out

ADAPTER = store.Purpose("taking the adapters of", "there is no checkpoint of adapters; make one with mpitrain adapter")


def plain_model(saved: SavedModel, *, dequantize: bool = False) -> SavedModel:
    """The saved model with its adapters added to its weights, and without them.

    UsageError where weights are kept in few bits, which could not take them: `dequantize` makes floats of these.
    """
    from mpitrain.shrink.lora import in_few_bits, merge
    low = in_few_bits(saved.model)
    if low and not dequantize:
        whose = f'"{low[0]}" and {len(low) - 1} more keep their weights' if len(low) > 1 else f'"{low[0]}" keeps its weight'
        raise UsageError(f"{whose} in few bits, which have no room for what an adapter adds; use the run as it is, or merge it "
                         "into floats with --dequantize")
    if dequantize and not low:
        raise UsageError("--dequantize is for adapters of weights in few bits, and this run has none; leave it out")
    formats = {path: name for path, name in saved.config.model.formats.items() if path not in low}
    sections = without(saved.config)
    made = saved.made_into(saved.model, **{**sections, "model": {**sections["model"], "formats": formats}})
    plain = make_model(made.config)
    plain.initialize(saved.config.run.seed, saved.config.train.precision)
    merge(saved.model, plain)
    return made.made_into(plain.eval().requires_grad_(False))


def refuse_adapters(saved: SavedModel) -> None:
    """UsageError for a model with adapters, whose layers cannot be made into others before these are in the weights."""
    if saved.config.lora.rank:
        run = saved.sources[0]
        raise UsageError(f"{run} has adapters beside its weights; merge them first (mpitrain merge {run} --out RUN2), and take "
                         "RUN2")


def base_sha256(model: nn.Module, new: Callable[[str], bool]) -> str:
    """The hash of what adapters leave as it is: all other parameters, and weights in few bits. Statistics go on."""
    kept: list[tuple[str, Any]] = [(name, leaf) for name, leaf in model.named_parameters() if not new(name)]
    kept += [(name, leaf) for name, leaf in model.named_buffers() if leaf.kind]
    return total_sha256(array_line(name, leaf.numpy()) for name, leaf in kept)


def write(folder: Path, saved: SavedModel) -> dict[str, Any]:
    """Writes a folder with a checkpoint of the adapters alone; what it says of them, with the hash of all other parameters.

    OutputError where the folder has something in it; UsageError where more than adapters was trained.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError("the folder is not empty; set --out to another", file=folder)
    new = is_new(saved.config)
    refuse_others(saved, new)
    a = saved.config.lora
    about = {"rank": a.rank, "alpha": a.alpha, "layers": list(a.layers), "base_sha256": base_sha256(saved.model, new)}
    with naming_out():
        store.save(folder, saved.step, [Piece.whole(name, leaf.numpy()) for name, leaf in _own(saved.model, new)],
                   {"adapter": about})
    return about


def refuse_others(saved: SavedModel, new: Callable[[str], bool]) -> None:
    """UsageError where further parameters were trained, which adapters alone would leave behind."""
    groups = groups_of(saved.config)
    moved = [name for name, _ in saved.model.named_parameters()
             if not new(name) and (group := group_of(groups, name)) is not None and group.factor and group.start < saved.step]
    if moved:
        raise UsageError(f'"{moved[0]}"{f" and {len(moved) - 1} more" if len(moved) > 1 else ""} of the run were trained beside '
                         "its adapters (optimizer.groups), and adapters alone would be without them; take the run as it is, or "
                         "merge it: mpitrain merge RUN --out RUN2")


def _own(model: nn.Module, new: Callable[[str], bool]) -> list[tuple[str, Any]]:
    """What an adapted model has of its own, by names in a checkpoint: its adapters, and statistics that training moved on."""
    found: list[tuple[str, Any]] = [(f"parameters/{name}", leaf) for name, leaf in model.named_parameters() if new(name)]
    return [*found, *((f"buffers/{name}", leaf) for name, leaf in model.named_buffers() if not leaf.kind)]


def with_adapter(base: SavedModel, folder: Path) -> SavedModel:
    """A saved model with the adapters of a folder that `write` made. CheckpointError for those of another base."""
    found = store.latest(folder, purpose=ADAPTER)
    about = found.meta.get("adapter")
    if not (isinstance(about, dict) and set(about) == {"rank", "alpha", "layers", "base_sha256"}):
        raise CheckpointError("the checkpoint is not one of adapters alone; make one with mpitrain adapter", file=found.folder)
    own = base_sha256(base.model, lambda name: False)
    if about["base_sha256"] != own:
        raise CheckpointError("the adapters are of a base whose parameters have the hash "
                              f"{str(about['base_sha256'])[:12]}.., found {own[:12]}..; give the run they were trained from, "
                              "whose other parameters stayed frozen", file=found.folder)
    made = base.made_into(base.model, lora={"rank": about["rank"], "alpha": about["alpha"], "layers": tuple(about["layers"])})
    model = make_model(made.config)
    model.initialize(base.config.run.seed, base.config.train.precision)
    values = {name: leaf.numpy() for name, leaf in (*base.model.named_parameters(), *base.model.named_buffers())}
    own_leaves = dict(_own(model, is_new(made.config)))
    found.check_names({name: (leaf.shape, leaf.dtype) for name, leaf in own_leaves.items()})
    for name, leaf in (*model.named_parameters(), *model.named_buffers()):
        if name in values:
            leaf.master[...] = values[name]
    for name, leaf in own_leaves.items():
        leaf.master[...] = found.read(name)
    for leaf in (*model.parameters(), *(leaf for _, leaf in model.named_buffers())):
        leaf.mark_changed()
    return replace(made.made_into(model.eval().requires_grad_(False)), sources=(*base.sources, folder))
