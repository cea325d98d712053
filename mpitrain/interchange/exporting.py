"""A saved model as a file for other programs: `FORMATS` by the ending of its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain import nn
from mpitrain.config.shrinking import floats
from mpitrain.errors import ConfigError, UsageError
from mpitrain.interchange import safetensors
from mpitrain.interchange.names import NAMES, every_leaf, outgoing
from mpitrain.interchange.tensors import Array, Stored, rounded
from mpitrain.nn.lowbit import LowBitEmbedding, LowBitLinear
from mpitrain.registry import Registry
from mpitrain.train.build.model import make_model
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
    dtype: str = ""                               # of files of tensors: "float16" or "bfloat16" in place of the model's floats
    dequantize: bool = False                      # layers in few bits as the floats that they stand for


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
    if wanted.dtype and ending == "onnx":
        raise UsageError("--dtype is for files of tensors; a graph computes in the model's own floats")
    if (wanted.cache or wanted.shape) and ending != "onnx":
        raise UsageError(f"{'--cache' if wanted.cache else '--input'} is for .onnx, which is a graph; leave it out")
    if saved.config.lora.rank:
        raise UsageError("the run has adapters beside its weights, which other programs do not add; make a run without them, "
                         "mpitrain merge RUN --out RUN2, and export that")
    if how := saved.config.shrink.quantize:
        raise UsageError(f'the run computes with its weights rounded to "{how}", which a file of floats does not say; export '
                         f"what mpitrain quantize RUN --format {how} --out RUN2 makes, or give {floats(saved.config.shrink)} for "
                         "its floats")
    few = few_bits(saved.model)
    if wanted.dequantize and not few:
        raise UsageError("--dequantize is for layers in few bits, and the run has none; leave it out")
    if wanted.dequantize:
        saved = dequantized(saved)
    elif few and wanted.dtype:
        raise UsageError(f'--dtype is for floats, and "{few[0]}" is in few bits; give --dequantize too')
    elif few and wanted.names not in ("", "own", "pytorch"):
        raise UsageError(f'names {wanted.names} are for floats, and "{few[0]}" is in few bits; give --dequantize, or --names own')
    FORMATS[ending](saved, wanted, tell)


def few_bits(model: nn.Module) -> list[str]:
    """The layers that are kept in few bits."""
    return [path for path, layer in model.named_modules() if isinstance(layer, LowBitLinear | LowBitEmbedding)]


def dequantized(saved: SavedModel) -> SavedModel:
    """The saved model with the floats that its layers in few bits stand for. ConfigError where two of them shared one weight
    once, and stand for others now."""
    plain = saved.made_into(saved.model, model={"formats": {}})
    model = make_model(plain.config)
    model.initialize(saved.config.run.seed, saved.config.train.precision)
    values = {name: np.asarray(leaf.numpy()) for name, leaf in (*saved.model.named_parameters(), *saved.model.named_buffers())}
    for path, layer in saved.model.named_modules():
        if isinstance(layer, LowBitLinear | LowBitEmbedding):
            values[f"{path}.weight"] = layer.dequantized()
    first = {id(leaf): name for name, leaf in model.named_parameters()}
    for name, leaf in every_leaf(model):
        if name in values and not np.array_equal(values[name], values[first.get(id(leaf), name)]):
            raise ConfigError(f'"{name}" and "{first[id(leaf)]}" are one weight in the model of floats, and are in other formats '
                              "here; for a gpt, give model.tied=false")
    model.load_state_dict({name: values[name] for name in model.state_dict()})
    return plain.made_into(model.eval().requires_grad_(False))


@FORMATS.register("safetensors")
def export_safetensors(saved: SavedModel, wanted: Wanted, tell: Tell) -> None:
    arrays, aliases, names = named(saved, wanted, "own", tell)
    hashes = {} if wanted.dtype else saved.hashes()
    about = {"format": "pt", ABOUT: json.dumps({**describe(saved, names), **hashes}), **aliases}    # transformers asks for "pt"
    if names == "own":
        arrays |= {DATA + name: np.asarray(value) for name, value in saved.transforms.state_dict().items()}
    safetensors.write(wanted.path, arrays, about, overwrite=wanted.overwrite)
    tell(f"{wanted.path}: {len(arrays)} tensors, {sum(array.nbytes for array in arrays.values()):,} bytes, names {names}")


def named(saved: SavedModel, wanted: Wanted, default: str, tell: Tell
          ) -> tuple[dict[str, Array | Stored], dict[str, str], str]:
    """(tensors, further names of tied ones, the table's name); a line where a reader has to transform inputs himself."""
    names = wanted.names or default
    table = NAMES.resolve(names, saved.config.folder)()
    found, aliases = outgoing(table, saved.model)
    arrays = {name: rounded(name, array, wanted.dtype) if wanted.dtype and array.dtype.kind == "f" else array
              for name, array in found.items()}
    if names != "own":
        say_transforms(saved, tell)
    return arrays, aliases, names


def say_transforms(saved: SavedModel, tell: Tell) -> None:
    """A line where inputs of the model are others than the rows of its data, and one where its outputs are other than targets."""
    if saved.transforms.names:
        tell(f"the file has no data.transform ({', '.join(saved.transforms.names)}): who uses it has to transform inputs first")
    if saved.transforms.targets is not None:
        tell(f"the file has no data.target_transform ({', '.join(saved.transforms.targets.names)}): outputs are of transformed "
             "targets, and who uses it has to undo that")


def describe(saved: SavedModel, names: str) -> dict[str, Any]:
    """What `import` wants to know of the model's configuration."""
    config = saved.config
    made = {key: value for key in ("shapes", "formats", "ranks") if (value := getattr(config.model, key))}
    return {"names": names, "model": {"name": config.model.name, **config.model.arguments, **made}, "step": saved.step,
            "precision": config.train.precision, "transform": list(config.data.transform),
            "target_transform": list(config.data.target_transform)}
