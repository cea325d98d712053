"""Machine files: what is shipped names its sources, what is read is what was written, and each mistake is one clear line."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from mpitrain.errors import ConfigError, MissingError
from mpitrain.machines import check_ranks, known_machines, load_machine, to_toml
from mpitrain.machines.machine import machine_of

PLAIN = """
name = "ours"
flops = {float32 = 1e12}
efficiency = 0.5
memory_bandwidth = 1e11
[[levels]]
name = "node"
ranks = 8
alpha = 1e-6
beta = 1e-10
gamma = 1e-11
[[levels]]
name = "cluster"
ranks = 0
alpha = 5e-6
beta = 1e-9
gamma = 1e-11
"""


def test_machines_of_the_published_curves_and_of_usual_networks_are_shipped() -> None:
    assert {"dgx-a100", "dgx-1", "pascal-roce", "ec2-p2-8xlarge", "ethernet-10g", "ethernet-40g-usnic", "roce-25g",
            "infiniband-2fdr", "infiniband-edr", "infiniband-hdr", "slingshot-200g"} == set(known_machines())


@pytest.mark.parametrize("name", known_machines())
def test_each_number_of_a_shipped_machine_has_a_source_or_is_said_to_be_assumed(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    given = [one.name for one in fields(machine) if one.name not in ("name", "levels", "measured", "sources", "assumed")
             and getattr(machine, one.name) != one.default]
    given += [f"levels.{level.name}.{key}" for level in machine.levels for key in ("alpha", "beta", "gamma")]
    assert [key for key in given if key not in machine.sources and key not in machine.assumed] == []
    keys = {one.name for one in fields(machine)} | {f"levels.{level.name}.{key.name}" for level in machine.levels
                                                    for key in fields(level)}
    assert {*machine.sources, *machine.assumed} <= keys
    assert all(len(source) > 10 for source in machine.sources.values())


@pytest.mark.parametrize("name", known_machines())
def test_a_machine_is_read_back_as_it_was_written(name: str) -> None:
    machine = replace(load_machine(name), measured={"rates": [[1, 2.5], [3, 4.0]], "further": {"2": {"alpha": 1e-6}}})
    assert machine_of(tomllib.loads(to_toml(machine))) == machine


def written(folder: Path, text: str) -> Path:
    path = folder / "m.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("old", "new", "said"), [
    ("beta = 1e-10\n", "", 'beta of level "node" is missing; write beta = 1e-10, say'),
    ("beta = 1e-10", "beta = -1e-10", 'beta of level "node" is -1e-10; it should be a number, 0 or more'),
    ("beta = 1e-10", "beta = nan", 'beta of level "node" is nan; it should be a number, 0 or more'),
    ("beta = 1e-10", "beta = inf", 'beta of level "node" is inf; it should be a number, 0 or more'),
    ("beta = 1e-10", "beta = true", 'beta of level "node" is true; it should be a number'),
    ("beta = 1e-10", 'beta = "fast"', 'beta of level "node" is "fast"; it should be a number'),
    ("beta = 1e-10", "bata = 1e-10", 'unknown key "bata" of level "node" (did you mean "beta"?)'),
    ("beta = 1e-10", "beta = 1e-10\nsharing = 0", 'sharing of level "node" is 0; it should be a number, above 0'),
    ("ranks = 8", "ranks = 8.5", 'ranks of level "node" is 8.5; it should be a whole number'),
    ("ranks = 8", "ranks = 0", 'level "node" takes any number of ranks (ranks = 0), and "cluster" lies outside'),
    ("ranks = 0", "ranks = 12", 'level "cluster" has 12 ranks, no multiple of the 8 of "node" inside of it; write ranks = 16'),
    ("ranks = 0", "ranks = 8", 'level "cluster" has 8 ranks, no multiple of the 8 of "node"'),
    ('name = "node"\n', "", "name of level 1 is missing"),
    ('name = "cluster"', 'name = "node"', "two levels of the machine have the same name: node, node"),
    ("efficiency = 0.5\n", "", "efficiency of the machine is missing; write efficiency = 0.5, say"),
    ("efficiency = 0.5", "efficiency = 58", "efficiency of the machine is 58; it is a share, 1 at most"),
    ("efficiency = 0.5", "efficiency = 0", "efficiency of the machine is 0; it should be a number, above 0"),
    ("efficiency = 0.5", "eficiency = 0.5", 'unknown key "eficiency" of the machine (did you mean "efficiency"?)'),
    ("flops = {float32 = 1e12}", "flops = 1e12", "flops of the machine is 1000000000000.0; it should be a table"),
    ("flops = {float32 = 1e12}", "flops = {}", "flops of the machine is empty"),
    ("flops = {float32 = 1e12}", "flops = {float32 = -1}", "flops.float32 of the machine is -1; it should be a number, above 0"),
    ("memory_bandwidth = 1e11", "memory_bandwidth = 1e11\nsources = {flops = 3}", "it should be a table of texts"),
    ("memory_bandwidth = 1e11", 'memory_bandwidth = 1e11\nassumed = "all"', "it should be a list of keys"),
    ("memory_bandwidth = 1e11", "memory_bandwidth = 1e11\nspread = -0.1", "spread of the machine is -0.1"),
    ("memory_bandwidth = 1e11", "memory_bandwidth = 1e11\nspread = 1e300", "spread of the machine is 1e+300; it is the standard"),
    ("flops = {", "flops = ", "not valid TOML"),
])
def test_a_mistake_in_a_file_is_said_with_its_key(old: str, new: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_machine(path)
    assert said in caught.value.message and "\n" not in caught.value.message.strip()
    assert caught.value.file == str(path)


def test_levels_must_be_a_list_of_tables(tmp_path: Path) -> None:
    for levels in ("levels = 3", "levels = []", "levels = [1]"):
        table: dict[str, Any] = tomllib.loads(PLAIN.split("[[levels]]")[0] + levels)
        with pytest.raises(ConfigError, match=r"write \[\[levels\]\]"):
            machine_of(table)


def test_an_unknown_machine_names_the_nearest_and_a_missing_file_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r'unknown machine "dgx-a10" \(did you mean "dgx-a100"\?\)'):
        load_machine("dgx-a10")
    with pytest.raises(MissingError, match="bench fit --out FILE"):
        load_machine(tmp_path / "none.toml")
    with pytest.raises(MissingError):
        load_machine(tmp_path)
    large = written(tmp_path, "#" * (1 << 20) + PLAIN)
    with pytest.raises(ConfigError, match="the largest that is read has 1048576"):
        load_machine(large)


def test_ranks_that_a_machine_cannot_have_are_refused(tmp_path: Path) -> None:
    machine = load_machine(written(tmp_path, PLAIN))
    for ranks in (1, 3, 8, 16, 4096):
        check_ranks(machine, ranks)
    with pytest.raises(ConfigError, match='12 ranks do not fill the 8 places of each "node" of machine ours; give 8 or 16'):
        check_ranks(machine, 12)
    with pytest.raises(ConfigError, match="0 ranks cannot be planned; give at least 1"):
        check_ranks(machine, 0)
    with pytest.raises(ConfigError, match='16 ranks are more than the 8 of machine ours, whose last level is "node"'):
        check_ranks(replace(machine, levels=machine.levels[:1]), 16)
