"""A file of another program, or one of ours, as a run folder with one checkpoint."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mpitrain import data, nn
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.config import Config, made_config
from mpitrain.errors import LONGEST_NAME, ConfigError, DataError, OtherModelError, UsageError, nearest, print_warning
from mpitrain.interchange import onnx_file, safetensors, torch_files
from mpitrain.interchange.exporting import ABOUT, DATA, Tell
from mpitrain.interchange.names import NAMES, Entry, NameTable, table_for
from mpitrain.interchange.tensors import BFLOAT16, Array, Stored, TensorFile, mapped, shown
from mpitrain.train.build.model import make_model
from mpitrain.train.build.saved import SavedModel, save

READERS: dict[str, Callable[[Path], TensorFile]] = {
    ".safetensors": safetensors.read, ".pt": torch_files.read, ".pth": torch_files.read, ".onnx": onnx_file.read}
PLAIN = (bool, int, float, str)
TRANSFORMS = ("transform", "target_transform")    # keys of [data]
PRECISIONS = ("float32", "float64", "bfloat16")
WRAPPERS = ("_orig_mod.", "module.")              # what torch.compile and DistributedDataParallel put before every name


def bring_in(source: Path | str | Mapping[str, Any], out: Path | str, *, names: str = "", overrides: Sequence[str] = (),
             overwrite: bool = False, tell: Tell = print) -> SavedModel:
    """Makes the run folder `out` of a file of tensors, or of a dict of arrays or CPU tensors by name; its model. `overrides` are
    ``section.key=value``: keys of [model] that the file does not say, and any others.

    MissingError, DataError (a damaged or hostile file), UsageError (no table of names), ConfigError (no such model),
    OtherModelError (tensors of another model), OutputError.
    """
    file = read(Path(source)) if isinstance(source, str | os.PathLike) else in_memory(source)
    out, path, about = Path(out), file.path, _about(file)
    if not names and ":" in about.get("names", ""):
        raise UsageError(f"the file has names of a table of somebody's own, {shown(about['names'])}; give --names yourself")
    names = names or about.get("names", "")
    if not names:
        raise UsageError(f"the file does not say whose names it has; give --names, one of {', '.join(NAMES)}")
    if not about and names == "own" and "model.name" not in {word.partition("=")[0] for word in overrides}:
        raise UsageError("the file does not say what model it is of; give model.name=NAME and the model's other keys")
    table = NAMES.resolve(names, Path.cwd())()
    tensors = unwrapped(file.tensors, table, tell)
    state = {name.removeprefix(DATA): stored for name, stored in tensors.items() if name.startswith(DATA)}
    tensors = {name: stored for name, stored in tensors.items() if not name.startswith(DATA)}
    config = _config(table, file, tensors, about, bool(state), list(overrides), out)
    model = make_model(config)
    entries = table.entries(model)
    found = matched(entries, table, model, table.incoming(tensors, entries), path)
    _fill(model, found, config, tell)
    d = config.data
    transforms = data.Transforms(d.transform, config.folder, d.target_transform, by_step=d.length > 0)
    transforms.load_state_dict({name: np.asarray(stored.values(), np.float64) for name, stored in state.items()})
    step = about.get("step", 0)
    saved = SavedModel(model.eval().requires_grad_(False), config, step if type(step) is int and 0 <= step < 10**8 else 0,
                       transforms, {"seed": config.run.seed}, () if isinstance(source, Mapping) else (path,))
    _compare(saved, about, path)
    save(out, saved, {"by": "import", "of": path.name, "names": names}, overwrite=overwrite)
    tell(f"{RunFolder(out).path}: {config.model.name}, {model.count_parameters():,} parameters")
    return saved


def read(path: Path) -> TensorFile:
    """The tensors of a file: of the format that its name ends with, or else that its first bytes are of."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        first = mapped(path)[:9].tobytes()
        if first[8:] == b"{":                                         # before it is a length, which may begin like anything
            reader = safetensors.read
        elif first.startswith((b"PK", b"\x80")):
            reader = torch_files.read
        elif first.startswith(b"\x08"):                               # the first field of a graph: its version
            reader = onnx_file.read
        else:
            raise DataError(f"expected a file of tensors, found what begins as no format does; its name says none, "
                            f"either: {', '.join(READERS)} are read", file=path)
    return reader(path)


def in_memory(arrays: Mapping[str, Any]) -> TensorFile:
    """The tensors of a dict. DataError for keys that are no names and for values that are no arrays of numbers."""
    path = Path("state_dict")
    if not isinstance(arrays, Mapping):
        raise DataError(f"expected a dict of arrays by name, found {type(arrays).__name__}", file=path)
    if wrong := next((name for name in arrays if not isinstance(name, str)), None):
        raise DataError(f"expected a dict of arrays by name, found the key {shown(wrong)}", file=path)
    return TensorFile(path, {name: _in_memory(path, name, value) for name, value in arrays.items()})


def _in_memory(path: Path, name: str, value: Any) -> Stored:
    """An array, or what becomes one: a tensor of this package, or of PyTorch, whose bfloat16 NumPy has not."""
    try:
        value = value.detach() if hasattr(value, "detach") else value
        wide = str(getattr(value, "dtype", "")) == "torch.bfloat16"
        found = value.float().numpy() if wide else value.numpy() if hasattr(value, "numpy") else np.asarray(value)
        if found.dtype.kind in "fiub" and (kind := found.dtype.newbyteorder("=").name) in safetensors.WORDS:
            return Stored(found, kind)
        said = f"an array of {found.dtype}"
    except (TypeError, ValueError, RuntimeError) as error:
        said = f"{type(value).__name__}: {error}"
    raise DataError(f"{shown(name)} is no array of numbers on the CPU, found {shown(said)[1:-1]}; take model.state_dict() as "
                    "it is", file=path)


def load_state_dict(model: nn.Module, arrays: Mapping[str, Any], names: str = "pytorch") -> None:
    """Gives a model, which has memory, the values of a dict of arrays or CPU tensors under the names of a table.

    OtherModelError where names or shapes are of another model, with the nearest name; DataError for what are no arrays.
    """
    table, file = table_for(model, names), in_memory(arrays)
    entries = table.entries(model)
    tensors = table.incoming(unwrapped(file.tensors, table, print_warning), entries)
    found = matched(entries, table, model, tensors, file.path)
    model.load_state_dict(values(found))


def _about(file: TensorFile) -> dict[str, Any]:
    """What a file of ours says of its model; {} of others'."""
    text = file.metadata.get(ABOUT)
    if not isinstance(text, str):
        return {}
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or not isinstance(found["model"], dict):
            raise ValueError("no table of the model")
        _bounded(found["model"], sum(stored.bits.size for stored in file.tensors.values()), len(file.tensors))
        if not isinstance(found.get("names"), str) or found["names"] not in NAMES and ":" not in found["names"]:
            raise ValueError(f"names {found.get('names')!r}")
        if not all(isinstance(found.get(key, []), list) for key in TRANSFORMS) or \
                found.get("precision", "float32") not in PRECISIONS:
            raise ValueError("transform, target_transform or precision is not what export writes")
    except (ValueError, KeyError, RecursionError) as error:
        raise DataError(f'its metadata "{ABOUT}" is not what export writes: {shown(str(error))}; export it again', file=file.path
                        ) from None
    return found


def _bounded(model: Mapping[str, Any], numbers: int, tensors: int) -> None:
    """ValueError for what is no plain value, and for sizes that no model of so many numbers has: building one would take memory,
    or for ever."""
    for key, value in model.items():
        if isinstance(value, dict) and key in ("shapes", "formats", "ranks"):   # of arrays or layers by name
            of_each = [n for one in value.values() for n in (one if key == "shapes" and isinstance(one, list) else [one])]
            _bounded({"layer": [*value, *of_each]}, numbers, tensors)
            continue
        for size in value if isinstance(value, list) else [value]:
            if not isinstance(size, PLAIN) or key in ("init_from", "arguments"):
                raise ValueError(f"model.{key} is {size}")
            if isinstance(size, str) and not (size.isprintable() and len(size) <= LONGEST_NAME):
                raise ValueError(f"model.{key} is {size!r}")
            if type(size) is int and abs(size) > (tensors if key == "layers" else max(numbers, 1 << 16)):
                raise ValueError(f"model.{key} = {size} for {tensors} tensors of {numbers} numbers")


def _config(table: NameTable, file: TensorFile, tensors: Mapping[str, Stored], about: Mapping[str, Any], has_state: bool,
            overrides: list[str], out: Path) -> Config:
    given = {key: text for key, _, text in (override.partition("=") for override in overrides)}
    model = about.get("model") or table.keys({name: stored.shape for name, stored in tensors.items()}, file, given)
    learned = has_state or about.get("names") == "own"
    transforms = {key: list(about.get(key, [])) if learned else [] for key in TRANSFORMS}
    if about:
        _refuse_code({f"{section}.{key}": value for section, keys in (("model", model), ("data", transforms))
                      for key, value in keys.items()}, given, file.path)
    kinds = {stored.dtype for stored in tensors.values() if stored.is_float}
    tables = {"model": model, "data": {**transforms, "validation": 0}, "run": {"out": str(out)},
              "train": {"epochs": 1, "precision": about.get("precision", "float64" if "float64" in kinds else "float32")}}
    return made_config(tables, overrides, out.name)


def _refuse_code(keys: Mapping[str, Any], given: Collection[str], path: Path) -> None:
    """ConfigError where a key that the user has not given names a module or a file, which would be imported."""
    for key, value in keys.items():
        text = json.dumps(value)
        if key not in given and ":" in text.replace('": ', ""):          # not the one between a key and its value
            raise ConfigError(f"the file names code of somebody's own in {key}, {shown(text)}, which is not run because a file "
                              f"says so; give {key}=... yourself if it is yours", file=path)


def unwrapped(tensors: Mapping[str, Stored], table: NameTable, tell: Tell) -> dict[str, Stored]:
    """The tensors without the words that wrappers have put before all names; a line says so."""
    found = dict(tensors)
    while found:
        prefix = next((word for word in WRAPPERS if all(name.startswith(word) for name in found)), None)
        if prefix is None:
            break
        tell(f'all names begin with "{prefix}", which a wrapper has put there; it is left out')
        found = {name.removeprefix(prefix): stored for name, stored in found.items()}
    if table.prefix and any(name.startswith(table.prefix) for name in found):
        found = {name.removeprefix(table.prefix): stored for name, stored in found.items()}
    return found


def matched(entries: Sequence[Entry], table: NameTable, model: nn.Module, tensors: Mapping[str, Stored], path: Path
            ) -> dict[str, tuple[Stored, bool]]:
    """For each name of ours its tensor, and whether it is transposed. OtherModelError where names or shapes are others."""
    shapes = {name: leaf.shape for name, leaf in (*model.named_parameters(), *model.named_buffers())}
    found: dict[str, tuple[Stored, bool]] = {}
    for entry in entries:
        if entry.theirs in tensors and entry.ours in found:
            _refuse_untied(entry, tensors[entry.theirs], found[entry.ours], path)
        elif entry.theirs in tensors:
            found[entry.ours] = tensors[entry.theirs], entry.transposed
    expected = {entry.theirs for entry in entries}
    extra = [name for name in tensors
             if name not in expected and not any(fnmatch.fnmatchcase(name, pattern) for pattern in table.passed_over)]
    missing = [entry.theirs for entry in entries if entry.ours not in found]
    if missing:
        _refuse(path, f"the model wants {_listed(missing)}, which the file has not{nearest(missing[0], extra or tensors)}; "
                      "another --names, or another model.* key, may fit")
    if few := [name for name in extra if name.endswith(".scale") and _is_whole(tensors.get(f"{name[:-6]}.weight"))]:
        _refuse(path, f"{shown(few[0][:-6])} is in few bits, and the file does not say in which format; export it as "
                      ".safetensors or .onnx, which say it, or with --dequantize")
    if extra:
        _refuse(path, f"the file has {_listed(extra)}, which the model has not{nearest(extra[0], expected)}; another --names, or "
                      "another model.* key, may fit")
    for entry in entries:
        stored, transposed = found[entry.ours]
        wanted, given = shapes[entry.ours], stored.shape[::-1] if transposed else stored.shape
        if wanted != given:
            turned = wanted == given[::-1]
            _refuse(path, f'{shown(entry.theirs)} has shape {shown(stored.shape)}, the model wants '
                          f"{wanted[::-1] if transposed else wanted}{': it is transposed; another --names may fit' * turned}"
                          f"{'; change the key of [model] that says it' * (not turned)}")
    return found


def _is_whole(stored: Stored | None) -> bool:
    return stored is not None and stored.dtype in ("int8", "uint8")


def _refuse_untied(entry: Entry, other: Stored, first: tuple[Stored, bool], path: Path) -> None:
    if other.dtype != first[0].dtype or other.shape != first[0].shape or other.bits.tobytes() != first[0].bits.tobytes():
        _refuse(path, f"{shown(entry.theirs)} is a further name of {entry.ours} in the model, and has other values; for a gpt, "
                      "give model.tied=false")


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(shown(name) for name in names[:3]) + rest


def _refuse(path: Path, message: str) -> NoReturn:
    raise OtherModelError(message, file=path)


def _fill(model: nn.Module, found: Mapping[str, tuple[Stored, bool]], config: Config, tell: Tell) -> None:
    """Gives the model its memory and the tensors' values; a line where they are not what they were."""
    model.initialize(config.run.seed, config.train.precision)
    leaves: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kinds: dict[tuple[str, str], int] = {}
    for name, (stored, _) in found.items():
        to = leaves[name].dtype.name
        if stored.is_float and stored.dtype != to:
            kinds[stored.dtype, to] = kinds.get((stored.dtype, to), 0) + 1
    for (one, other), count in kinds.items():
        exact = one in ("float16", BFLOAT16) or other == "float64"
        how = "exactly" if exact else "rounded: train.precision=float64 keeps them"
        tell(f"{count} tensor{'s' * (count > 1)} of {one} made {other}, {how}")
    model.load_state_dict(values(found))


def values(found: Mapping[str, tuple[Stored, bool]]) -> dict[str, Array]:
    """The arrays of tensors, each as ours are."""
    return {name: stored.values().T if transposed else stored.values() for name, (stored, transposed) in found.items()}


def _compare(saved: SavedModel, about: Mapping[str, Any], path: Path) -> None:
    if about.get("names") and about.get("precision") == saved.config.train.precision:
        for key, value in saved.hashes().items():
            if about.get(key, value) != value:
                raise DataError(f"{key} of its tensors is {value[:12]}.., and the file says {shown(about[key])[1:13]}..: it is "
                                "damaged, or was changed after export", file=path)


