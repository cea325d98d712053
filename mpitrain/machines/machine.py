"""A machine as plans see it: what compute, memory, messages and the interpreter cost, each number with its source.

    name = "dgx-a100"
    flops = {bfloat16 = 312e12, float32 = 19.5e12}     # peak of a rank's processor, FLOP/s
    efficiency = 0.66                                  # the share of it that compute reaches
    assumed = ["efficiency"]                           # what has no source; a plan that uses the file says so

    [[levels]]                                         # from the inside out
    name = "node"
    ranks = 8                                          # so many share it; 0: any number
    alpha = 3e-6                                       # seconds a message
    beta = 4e-12                                       # seconds a byte
    gamma = 1.5e-12                                    # seconds a byte added up
    sharing = 1                                        # so many ranks of a unit inside of it share one link

    [sources]
    flops = "NVIDIA A100 datasheet"
    "levels.node.beta" = "..."

`bench fit --out` writes such a file of this machine.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from mpitrain.errors import AccessError, ConfigError, MissingError, nearest
from mpitrain.files.toml import toml
from mpitrain.machines.checks import check_measured, number
from mpitrain.schedules.level_times import Level

FOLDER = Path(__file__).parent
LARGEST_FILE = 1 << 20                       # bytes; what `bench fit` writes has 10 kB
TABLES = ("flops", "measured", "sources")
WHOLE = ("ranks", "sharing", "cores")
SHARES = ("efficiency", "overlap")
MOST_SPREAD = 10.0                           # e^10: ranks of which one takes 20,000 times as long as another
POSITIVE = ("efficiency", "memory_bandwidth", "sharing")
EXAMPLES = {"name": '"ours"', "levels": "[{...}]", "flops": "{float32 = 1e12}", "efficiency": "0.5", "memory_bandwidth": "1e11",
            "ranks": "8", "alpha": "1e-6", "beta": "1e-10", "gamma": "1e-11"}


@dataclass(frozen=True)
class MachineFile:
    """`levels` go from the inside out. Speeds are those of one rank. 0 stands for unknown where no other meaning is given.

    flops             peak FLOP/s of a rank by dtype                  efficiency    the share of it that compute reaches
    memory_bandwidth  bytes/s                                         memory_bytes  of a rank; 0: no limit is known
    collective_s      seconds of the interpreter for one collective   message_s     the same for one message
    reader_bytes_s    bytes/s that data are read with; 0: at once     spread        standard deviation of the log of step seconds
    idle_watts, busy_watts   of a rank's processor                    cores         of a host; 0: as many as ranks
    overlap           share of the exchange that can travel while the rank computes: 0 where its own core moves the bytes
    measured          what `bench fit` adds: tables                   sources       key -> where the number comes from
    assumed           keys without a source
    """

    name: str
    levels: tuple[Level, ...]
    flops: Mapping[str, float]
    efficiency: float
    memory_bandwidth: float
    memory_bytes: float = 0.0
    collective_s: float = 0.0
    message_s: float = 0.0
    reader_bytes_s: float = 0.0
    spread: float = 0.0
    idle_watts: float = 0.0
    busy_watts: float = 0.0
    cores: float = 0
    overlap: float = 1.0
    measured: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()


def known_machines() -> list[str]:
    """The names of the machines that are built in."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_machine(name_or_path: str | Path) -> MachineFile:
    """The machine of a built-in name ("dgx-a100") or of a file (a name that ends in .toml).

    MissingError where there is none; ConfigError that names file and key for what it cannot mean.
    """
    text = str(name_or_path)
    path = Path(text) if text.endswith(".toml") else FOLDER / f"{text}.toml"
    if not path.is_file():
        if text.endswith(".toml"):
            raise MissingError("expected a machine file; `mpitrain bench fit --out FILE` writes one of this machine", file=path)
        raise MissingError(f'unknown machine "{text}"{nearest(text, known_machines())}; a file of your own ends in .toml')
    if path.stat().st_size > LARGEST_FILE:
        raise ConfigError(f"expected a machine file, found {path.stat().st_size} bytes; the largest that is read has "
                          f"{LARGEST_FILE}", file=path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"not valid TOML: {error}", file=path) from None
    except PermissionError:
        raise AccessError("the machine file may not be read; change its permissions", file=path) from None
    return machine_of(table, path)


def machine_of(table: Mapping[str, Any], file: Path | None = None) -> MachineFile:
    """The machine that a table describes. ConfigError as of `load_machine`."""
    check_keys(table, MachineFile, "the machine", file)
    levels = table["levels"]
    if not (isinstance(levels, list) and levels and all(isinstance(level, dict) for level in levels)):
        raise ConfigError(f"levels of the machine is {toml(levels)}; write [[levels]], one or more, from the inside out",
                          file=file)
    for key, value in table.items():
        check_value(key, value, "the machine", file)
    for dtype, value in table["flops"].items():
        number(value, f"flops.{dtype} of the machine", file, positive=True)
    check_measured(table.get("measured", {}), file)
    made = MachineFile(**{key: value for key, value in table.items() if key not in ("levels", "assumed")},
                       levels=tuple(level_of(level, place, file) for place, level in enumerate(levels)),
                       assumed=tuple(table.get("assumed", ())))
    check_levels(made.levels, file)
    return made


def level_of(table: Mapping[str, Any], place: int, file: Path | None) -> Level:
    name = table.get("name")
    what = f'level "{name}"' if isinstance(name, str) else f"level {place + 1}"
    check_keys(table, Level, what, file)
    for key, value in table.items():
        check_value(key, value, what, file)
    return Level(**table)


def check_keys(table: Mapping[str, Any], kind: type[MachineFile] | type[Level], what: str, file: Path | None) -> None:
    known = {one.name: one.default is MISSING and one.default_factory is MISSING for one in fields(kind)}
    for key in table:
        if key not in known:
            raise ConfigError(f'unknown key "{key}" of {what}{nearest(key, known)}', file=file)
    for key, required in known.items():
        if required and key not in table:
            raise ConfigError(f"{key} of {what} is missing; write {key} = {EXAMPLES[key]}, say", file=file)


def check_value(key: str, value: Any, what: str, file: Path | None) -> None:
    """ConfigError for a value of another type, a negative number, or one beyond its limit."""
    where = f"{key} of {what}"
    if key in TABLES:
        if not isinstance(value, dict) or (key == "sources" and not all(isinstance(source, str) for source in value.values())):
            raise ConfigError(f"{where} is {toml(value)}; it should be a table{' of texts' * (key == 'sources')}", file=file)
        if key == "flops" and not value:
            raise ConfigError(f"{where} is empty; write flops = {EXAMPLES['flops']}, say", file=file)
    elif key == "name":
        if not isinstance(value, str):
            raise ConfigError(f"{where} is {toml(value)}; it should be a text", file=file)
    elif key == "assumed":
        if not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            raise ConfigError(f"{where} is {toml(value)}; it should be a list of keys", file=file)
    elif key != "levels":
        number(value, where, file, positive=key in POSITIVE)
        if key in WHOLE and not isinstance(value, int):
            raise ConfigError(f"{where} is {toml(value)}; it should be a whole number", file=file)
        if key in SHARES and value > 1:
            raise ConfigError(f"{where} is {toml(value)}; it is a share, 1 at most", file=file)
        if key == "spread" and value > MOST_SPREAD:
            raise ConfigError(f"{where} is {toml(value)}; it is the standard deviation of a logarithm, {MOST_SPREAD:g} at most, "
                              "and below 0.1 on most machines", file=file)


def check_levels(levels: tuple[Level, ...], file: Path | None) -> None:
    """ConfigError for levels that do not lie inside each other."""
    if len({level.name for level in levels}) < len(levels):
        raise ConfigError(f"two levels of the machine have the same name: {', '.join(level.name for level in levels)}", file=file)
    for inner, outer in pairwise(levels):
        if not inner.ranks:
            raise ConfigError(f'level "{inner.name}" takes any number of ranks (ranks = 0), and "{outer.name}" lies outside; '
                              f"only the last level may", file=file)
        if outer.ranks % inner.ranks or outer.ranks == inner.ranks:
            raise ConfigError(f'level "{outer.name}" has {outer.ranks} ranks, no multiple of the {inner.ranks} of "{inner.name}" '
                              f'inside of it; write ranks = {2 * inner.ranks}, say, or 0 for any number', file=file)


def check_ranks(machine: MachineFile, ranks: int) -> None:
    """ConfigError for a number of ranks that the machine does not hold, or that leaves one of several nodes partly empty."""
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks cannot be planned; give at least 1")
    last = machine.levels[-1]
    if last.ranks and ranks > last.ranks:
        raise ConfigError(f'{ranks} ranks are more than the {last.ranks} of machine {machine.name}, whose last level is '
                          f'"{last.name}"; give fewer, or add a level to its file')
    for level in machine.levels:
        if level.ranks and ranks > level.ranks and ranks % level.ranks:
            below = ranks // level.ranks * level.ranks
            raise ConfigError(f'{ranks} ranks do not fill the {level.ranks} places of each "{level.name}" of machine '
                              f"{machine.name}; give {below} or {below + level.ranks}")


def to_toml(machine: MachineFile) -> str:
    """The machine as text that `load_machine` reads back to an equal one."""
    lines, tables = [], []
    for one in fields(machine):
        value = getattr(machine, one.name)
        if one.name == "levels":
            tables += ["[[levels]]\n" + "".join(f"{key.name} = {toml(getattr(level, key.name))}\n" for key in fields(level))
                       for level in value]
        elif one.name in ("measured", "sources"):
            if value:
                tables.append(f"[{one.name}]\n" + "".join(f"{toml(key)} = {toml(part)}\n" for key, part in value.items()))
        else:
            lines.append(f"{one.name} = {toml(dict(value) if isinstance(value, Mapping) else value)}\n")
    return "".join(lines) + "\n" + "\n".join(tables)
