"""A saved model as a file for other programs: `FORMATS` by the ending of its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.errors import UsageError
from mpitrain.interchange import safetensors
from mpitrain.interchange.names import NAMES, outgoing
from mpitrain.interchange.tensors import Array
from mpitrain.registry import Registry
from mpitrain.train.build.saved import SavedModel

ABOUT = "mpitrain"                                # the key of a file's metadata that has the model's configuration
DATA = "data/"                                    # before the names of what transforms have learned


@dataclass(frozen=True)
class Wanted:
    """What is asked of a file."""

    path: Path
    names: str = ""                               # the table of names; "" is the format's own choice
    overwrite: bool = False
    cache: bool = False                           # ONNX of a gpt: with keys and values of earlier tokens
    shape: tuple[int, ...] = ()                   # ONNX: the shape of a sample, where the model takes several


Tell = Callable[[str], None]
FORMATS: Registry[Callable[[SavedModel, Wanted, Tell], None]] = Registry("format")
FORMATS.register_later("pt", "mpitrain.interchange.torch_files:export_pt")
FORMATS.register_later("onnx", "mpitrain.interchange.onnx_writer:export_onnx")
FORMATS.register_later("pth", "mpitrain.interchange.torch_files:export_pt")


def export(saved: SavedModel, wanted: Wanted, tell: Tell = print) -> None:
    """Writes a saved model as the format that the file's name ends with; `tell` gets a line for what a reader has to know.

    UsageError for a format or a flag that is not there, ConfigError for a table of names that is for other models, OutputError
    where the file is there already.
    """
    ending = wanted.path.suffix.removeprefix(".")
    if ending not in FORMATS:
        known = ", ".join(f".{name}" for name in FORMATS)
        raise UsageError(f'the name of the file ends with "{wanted.path.suffix}", which says the format; expected one of {known}')
    if (wanted.cache or wanted.shape) and ending != "onnx":
        raise UsageError(f"{'--cache' if wanted.cache else '--input'} is for .onnx, which is a graph; leave it out")
    FORMATS[ending](saved, wanted, tell)


@FORMATS.register("safetensors")
def export_safetensors(saved: SavedModel, wanted: Wanted, tell: Tell) -> None:
    arrays, aliases, names = named(saved, wanted.names or "own", tell)
    about = {"format": "pt", ABOUT: json.dumps(describe(saved, names)), **aliases}      # transformers asks for "pt"
    if names == "own":
        arrays |= {DATA + name: np.asarray(value) for name, value in saved.transforms.state_dict().items()}
    safetensors.write(wanted.path, arrays, about, overwrite=wanted.overwrite)
    tell(f"{wanted.path}: {len(arrays)} tensors, {sum(array.nbytes for array in arrays.values()):,} bytes, names {names}")


def named(saved: SavedModel, names: str, tell: Tell) -> tuple[dict[str, Array], dict[str, str], str]:
    """(arrays, further names of tied ones, the table's name); a line where a reader has to transform inputs himself."""
    table = NAMES.resolve(names, saved.config.folder)()
    arrays, aliases = outgoing(table, saved.model)
    if saved.transforms.names and names != "own":
        tell(f"the file has no data.transform ({', '.join(saved.transforms.names)}): who uses it has to transform inputs first")
    return arrays, aliases, names


def describe(saved: SavedModel, names: str) -> dict[str, Any]:
    """What `import` wants to know: the model's configuration, and the hashes to compare with."""
    config = saved.config
    return {"names": names, "model": {"name": config.model.name, **config.model.arguments}, "step": saved.step,
            "precision": config.train.precision, "transform": list(config.data.transform), **saved.hashes()}
