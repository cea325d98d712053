"""Validation of what makes a model smaller: [shrink], [lora], [distil] and model.ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from mpitrain.config.messages import Refusal, toml, written
from mpitrain.config.sections import Config, keys_of
from mpitrain.config.shrink_sections import PRUNERS, DistilConfig, LoraConfig, ShrinkConfig


def keys_off(shrink: ShrinkConfig, keys: Iterable[str]) -> str:
    """What to give on a command line so that these keys of [shrink] are as if they were left out: those that are not."""
    return " ".join(f"shrink.{key}={toml(getattr(ShrinkConfig, key))}" for key in keys
                    if getattr(shrink, key) != getattr(ShrinkConfig, key))


def floats(shrink: ShrinkConfig) -> str:
    """What to give for the floats of a run that rounds its weights."""
    return keys_off(shrink, ("quantize",) if shrink.prune else ("quantize", "least", "skip"))


def pruning(config: Config) -> Iterator[Refusal]:
    s = config.shrink
    if not s.prune:
        also = {"quantize", "least", "skip"}      # a run that was trained for few bits is used without them by shrink.quantize=""
        given = [key for key in keys_of("shrink") if key not in also and getattr(s, key) != getattr(ShrinkConfig, key)]
        if given:
            yield (f"shrink.{given[0]} is there, and nothing is pruned; set shrink.prune to {', '.join(map(toml, PRUNERS))}, or "
                   f"leave shrink.{given[0]} out", (f"shrink.{given[0]}", "shrink.prune"))
        return
    keys = ("shrink.sparsity", "shrink.prune")
    if s.prune == "n:m" and s.sparsity:
        yield f'shrink.sparsity = {s.sparsity} is not for "n:m", whose pattern is the share of zeros; leave it out', keys
    elif s.prune != "n:m" and not 0 < s.sparsity < 1:
        yield f"shrink.sparsity must lie in (0, 1), found {written(s.sparsity)}", keys
    if s.prune in ("n:m", "block") and not s.pattern:
        yield (f'shrink.prune = "{s.prune}" needs shrink.pattern, such as {"2:4" if s.prune == "n:m" else "16x1"}',
               ("shrink.pattern", "shrink.prune"))
    for key, rules, value in (("pattern", ("magnitude",), s.pattern), ("scope", ("n:m",), s.scope == "global")):
        if s.prune in rules and value:
            yield (f'shrink.{key} = "{getattr(s, key)}" is not for shrink.prune = "{s.prune}"; leave it out',
                   (f"shrink.{key}", "shrink.prune"))
    if s.begin > s.end:
        yield f"shrink.begin = {s.begin} comes after shrink.end = {s.end}; set shrink.end to {s.begin} or more", \
            ("shrink.begin", "shrink.end")
    if not (s.rewind == "never" if isinstance(s.rewind, str) else 0 <= s.rewind < max(1, s.end)):
        yield (f'shrink.rewind must be "never", or a step before shrink.end = {s.end}, when weights go back; found '
               f"{toml(s.rewind)}", ("shrink.rewind", "shrink.end"))
    if ":" in config.comm.sharding:
        yield (f'shrink.prune = "{s.prune}" is not for comm.sharding = "{config.comm.sharding}", whose updates nobody masks; set '
               'comm.sharding to one of ours', ("shrink.prune", "comm.sharding"))


def adapters(config: Config) -> Iterator[Refusal]:
    """Adapters are of a trained model, and alone change in training."""
    a = config.lora
    if not a.rank:
        given = [key for key in keys_of("lora") if getattr(a, key) != getattr(LoraConfig, key)]
        if given:
            yield (f"lora.{given[0]} is there, and lora.rank is 0, so that nothing is adapted; set lora.rank, such as 8, or "
                   f"leave lora.{given[0]} out", (f"lora.{given[0]}", "lora.rank"))
        return
    if not config.model.init_from:
        yield (f"lora.rank = {a.rank} adapts a trained model, and model.init_from names none; set it to a run folder",
               ("lora.rank", "model.init_from"))
    if config.shrink.prune:
        off = keys_off(config.shrink, (key for key in keys_of("shrink") if key not in ("products", "quantize", "least")))
        yield (f'shrink.prune = "{config.shrink.prune}" would prune the adapters of lora.rank = {a.rank}, which alone are '
               f"trained; leave it out ({off}): weights that are zero stay so beside adapters", ("lora.rank", "shrink.prune"))
    if a.alpha <= 0:
        yield f"lora.alpha must be more than 0, found {a.alpha}", ("lora.alpha",)
    if not a.layers:
        yield 'lora.layers must name a layer, such as "block*.attention.qkv", found []', ("lora.layers",)


def factors(config: Config) -> Iterator[Refusal]:
    if config.model.ranks and config.mesh.tp > 1:
        yield (f"model.ranks makes two layers of one, which mesh.tp = {config.mesh.tp} does not cut; set mesh.tp = 1 and use "
               "mesh.dp or mesh.pp", ("model.ranks", "mesh.tp"))


def teachers(config: Config) -> Iterator[Refusal]:
    """A teacher's outputs are compared with those of a whole model, as classes."""
    d, t = config.distil, config.train
    if not d.teaches:
        given = [key for key in keys_of("distil") if getattr(d, key) != getattr(DistilConfig, key)]
        if given:
            yield (f"distil.{given[0]} is there, and no teacher; set distil.teacher to a run folder, or distil.predictions to a "
                   f"file of its outputs, or leave distil.{given[0]} out", (f"distil.{given[0]}", "distil.teacher"))
        return
    if d.teacher and d.predictions:
        yield ("distil.teacher and distil.predictions name two teachers; leave out one of them",
               ("distil.teacher", "distil.predictions"))
    key = "distil.teacher" if d.teacher else "distil.predictions"
    out, found = (Path(os.path.realpath(path)) for path in (config.run.out, config.folder / (d.teacher or d.predictions)))
    if out in (found, *found.parents) or found in out.parents:
        yield (f"{key} = {toml(d.teacher or d.predictions)} and run.out = {toml(config.run.out)} are one folder, or one lies in "
               "the other, and a run would write over what it learns from; set run.out to another folder", (key, "run.out"))
    if d.temperature <= 0:
        yield f"distil.temperature must be more than 0, found {d.temperature}", ("distil.temperature",)
    if not 0 < d.weight <= 1:
        yield f"distil.weight must lie in (0, 1], found {d.weight}", ("distil.weight",)
    if t.loss != "cross_entropy" or "weight" in t.arguments:
        found_loss = f'train.loss = "{t.loss}"' if t.loss != "cross_entropy" else "train.weight"
        yield (f'{key} is for train.loss = "cross_entropy" without weights of classes, found {found_loss}; change it',
               (key, "train.loss"))
    if config.mesh.cp > 1:
        yield (f"{key} compares whole outputs, and mesh.cp = {config.mesh.cp} cuts them; set mesh.cp = 1", (key, "mesh.cp"))
    if t.device != "cpu":
        yield f'{key} is for train.device = "cpu", found "{t.device}"', (key, "train.device")


SHRINKING = (pruning, adapters, factors, teachers)
