"""A machine as plans see it: what compute, memory, messages and the interpreter cost, each number with its source.

    name = "dgx-a100"
    flops = {bfloat16 = 312e12, float32 = 19.5e12}     # peak of a rank's processor, FLOP/s
    efficiency = 0.58                                  # the share of it that compute reaches
    assumed = ["efficiency"]                           # what has no source; a plan that uses the file says so

    [[levels]]                                         # from the inside out
    name = "NVSwitch"
    ranks = 8                                          # so many share it; 0: any number
    alpha = 3e-6                                       # seconds a message
    beta = 4e-12                                       # seconds a byte
    gamma = 1.25e-12                                   # seconds a byte added up

    [sources]
    flops = "NVIDIA A100 datasheet"
    "levels.NVSwitch.beta" = "..."

`bench fit --out` writes such a file of this machine.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any

from mpitrain.errors import ConfigError, MissingError, nearest
from mpitrain.files.toml import toml
from mpitrain.schedules.level_times import Level

FOLDER = Path(__file__).parent


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
    cores: float = 0.0
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
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not valid TOML: {error}", file=path) from None
    return machine_of(table, path)


def machine_of(table: Mapping[str, Any], file: Path | None = None) -> MachineFile:
    """The machine that a table describes. ConfigError as of `load_machine`."""
    known = [one.name for one in fields(MachineFile)]
    for key in table:
        if key not in known:
            raise ConfigError(f'unknown key "{key}" of a machine{nearest(key, known)}', file=file)
    for key in ("name", "levels", "flops", "efficiency", "memory_bandwidth"):
        if key not in table:
            raise ConfigError(f"{key} of the machine is missing", file=file)
    levels = tuple(level_of(one, place, file) for place, one in enumerate(table["levels"]))
    rest = {key: value for key, value in table.items() if key not in ("levels", "assumed")}
    for key in known:
        value = rest.get(key)
        if isinstance(value, (int, float)) and not 0 <= value < inf:
            raise ConfigError(f"{key} of the machine is {value}; it should be a number, 0 or more", file=file)
    return MachineFile(levels=levels, assumed=tuple(table.get("assumed", ())), **rest)


def level_of(table: Mapping[str, Any], place: int, file: Path | None) -> Level:
    for key in ("name", "ranks", "alpha", "beta", "gamma"):
        if key not in table:
            raise ConfigError(f"{key} of level {place + 1} of the machine is missing", file=file)
    level = Level(**table)
    for key in ("ranks", "alpha", "beta", "gamma", "sharing"):
        if not 0 <= getattr(level, key) < inf:
            raise ConfigError(f'{key} of level "{level.name}" is {getattr(level, key)}; it should be 0 or more', file=file)
    return level


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
