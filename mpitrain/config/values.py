"""Validation of single keys, and of pairs of keys on any mesh; and values as TOML, as messages show them."""

from __future__ import annotations

import json
import math
import os
import sys
import typing
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal

from mpitrain.config.sections import (
    POLICIES,
    PRUNERS,
    SECTIONS,
    CommConfig,
    Config,
    DistilConfig,
    LoraConfig,
    ShrinkConfig,
    keys_of,
)
from mpitrain.errors import nearest

LARGEST_BUCKET_MB = 1 << 20              # a TiB: more than any model, and a number of bytes that is finite
LAYOUT = 'train.reproducible = "layout"'
LEAST = {"train.epochs": 0, "train.steps": 0, "train.batch_size": 1, "train.micro_batches": 0, "train.threads": 0,
         "train.eval_every": 0, "train.copy_every": 0, "data.stride": 1, "data.workers": 0, "mesh.pp": 1, "mesh.dp": 0,
         "mesh.ep": 1, "mesh.cp": 1, "mesh.tp": 1, "mesh.chunks": 1, "log.every": 1, "checkpoint.every": 0, "checkpoint.keep": 1,
         "optimizer.warmup_steps": 0, "run.seed": 0, "lora.rank": 0,
         "shrink.begin": 0, "shrink.end": 0, "shrink.every": 1, "shrink.least": 0}
NOT_NEGATIVE = ("optimizer.lr", "optimizer.clip_norm", "optimizer.weight_decay", "optimizer.min_lr", "optimizer.gamma",
                "train.cached_mb", "train.stall_s", "train.start_s", "log.progress_s")
WORDS: dict[str, Any] = {f"{name}.{key}": typing.get_args(hint) for name in SECTIONS for key, hint in keys_of(name).items()
         if typing.get_origin(hint) is Literal}
WORDS["comm.sharding"], WORDS["shrink.prune"] = POLICIES, ("", *PRUNERS)
OWN = ("comm.sharding", "shrink.prune")                 # keys that may name a user's own thing, too

PATHS = ("run.out", "data.path", "data.validation", "model.init_from", "optimizer.offload_folder", "distil.teacher")
LONGEST_NAME, LONGEST_PATH = 255, 4095   # bytes: NAME_MAX of all file systems but a few, which have less; PATH_MAX less its last
IN_A_RUN = 100                           # bytes of the longest path inside a run folder, and some to spare
BY_LOCALE = (f"has letters that this locale, whose encoding is {sys.getfilesystemencoding()}, has not: set LC_ALL=C.UTF-8, or "
             "PYTHONUTF8=1, so that it can be")

Refusal = tuple[str, tuple[str, ...]]    # the message, and the keys it is about


def check_values(config: Config) -> None:
    """Raises ConfigError for the first value, or pair of values, that may never stand there."""
    for message, keys in (refusal for rule in VALUES for refusal in rule(config)):
        raise config.wrong(message, keys)


def value_of(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def length_of_the_run(config: Config) -> Iterator[Refusal]:
    t = config.train
    if bool(t.epochs) == bool(t.steps):
        yield (f"give train.epochs or train.steps, {'not both' if t.epochs else 'one of them'}", ("train.epochs", "train.steps"))


def numbers(config: Config) -> Iterator[Refusal]:
    for key, least in LEAST.items():
        if value_of(config, key) < least:
            yield f"{key} must be at least {least}, found {value_of(config, key)}", (key,)
    for key in NOT_NEGATIVE:
        if not 0 <= value_of(config, key) < math.inf:
            yield f"{key} must be a finite number, 0 or more, found {_written(value_of(config, key))}", (key,)
    size = config.comm.bucket_mb
    if not (size == "auto" if isinstance(size, str) else 0 < size <= LARGEST_BUCKET_MB):
        yield (f'comm.bucket_mb must be more than 0, at most {LARGEST_BUCKET_MB}, or "auto", found {_written(size)}; '
               f"set it to {CommConfig.bucket_mb} if in doubt", ("comm.bucket_mb",))


def intervals(config: Config) -> Iterator[Refusal]:
    every = config.train.compare_every
    if not (every == "auto" if isinstance(every, str) else every >= 0):
        yield (f'train.compare_every must be a number of steps, 0 or more, or "auto", found {toml(every)}',
               ("train.compare_every",))


def lists(config: Config) -> Iterator[Refusal]:
    t, o = config.train, config.optimizer
    if any(step < 0 for step in o.milestones):
        yield f"optimizer.milestones must be steps, at least 0 each, found {list(o.milestones)}", ("optimizer.milestones",)
    if not 0 <= o.momentum < 1:
        yield f"optimizer.momentum must lie in [0, 1), found {o.momentum}", ("optimizer.momentum",)
    if len(o.betas) != 2 or not all(0 <= b < 1 for b in o.betas):
        yield f"optimizer.betas must be two numbers in [0, 1), found {list(o.betas)}", ("optimizer.betas",)
    if isinstance(t.recompute, int) and t.recompute < 0:
        yield (f"train.recompute must be true, false, a number of blocks, 0 or more, or names of blocks, found {t.recompute}",
               ("train.recompute",))
    if t.micro_batches > t.batch_size:
        yield (f"train.micro_batches = {t.micro_batches} is more than the {t.batch_size} samples of train.batch_size",
               ("train.micro_batches", "train.batch_size"))


def words(config: Config) -> Iterator[Refusal]:
    for key, known in WORDS.items():
        word = value_of(config, key)
        if word not in known and not (key in OWN and ":" in word):
            yield f'{key} = "{word}" is not there{nearest(word, known)}', (key,)
    stages = config.mesh.stages
    if isinstance(stages, str) and stages not in ("blocks", "time"):
        yield (f'mesh.stages = "{stages}" is not there{nearest(stages, ("blocks", "time"))}; or give the number of blocks of '
               "each stage", ("mesh.stages",))


def one_thread(config: Config) -> Iterator[Refusal]:
    t = config.train
    if t.reproducible == "layout" and t.threads > 1:
        yield (f"{LAYOUT} needs one BLAS thread a rank, found train.threads = {t.threads}; set it to 0 or 1",
               ("train.reproducible", "train.threads"))
    if t.precision == "bfloat16" and t.threads > 1:
        yield (f'train.precision = "bfloat16" computes on one thread a rank, found train.threads = {t.threads}; set it to 0 or 1 '
               "and start a rank per core", ("train.precision", "train.threads"))


def finite(config: Config) -> Iterator[Refusal]:
    """Numbers must be finite: checkpoints could hold no others."""
    for section in SECTIONS:
        values = dict(vars(getattr(config, section)))
        for key, value in (values | values.pop("arguments", {})).items():
            if not _is_finite(value):
                yield f"{section}.{key} must be finite, found {toml(value)}", (f"{section}.{key}",)


def texts(config: Config) -> Iterator[Refusal]:
    """Names must be text: config.toml, run.json and checkpoints are UTF-8, and name them."""
    for section in SECTIONS:
        values = dict(vars(getattr(config, section)))
        for key, value in (values | values.pop("arguments", {})).items():
            if _is_text(value):
                continue
            why = f"{BY_LOCALE} read" if _is_utf8(value) else "is not UTF-8, and the run's files, which name it, are; rename it"
            yield f"{section}.{key} = {toml(value)} {why}", (f"{section}.{key}",)


def paths(config: Config) -> Iterator[Refusal]:
    """Names of files must have a length that systems take, and letters that the locale has."""
    for key in PATHS:
        value = value_of(config, key)
        if not isinstance(value, str):
            continue
        try:
            whole = os.fsencode(value)
        except UnicodeEncodeError:
            yield f"{key} = {toml(value)} {BY_LOCALE} write", (key,)
            continue
        longest, room = max(map(len, whole.split(b"/"))), LONGEST_PATH - (IN_A_RUN if key == "run.out" else 0)
        if longest > LONGEST_NAME:
            yield (f"{key} has a name of {longest} bytes, and file systems take {LONGEST_NAME} at most; shorten it",
                   (key, "run.name") if key == "run.out" else (key,))
        elif len(whole) > room:
            yield f"{key} is a path of {len(whole)} bytes, and {room} are the most that the system takes; shorten it", (key,)


def times(config: Config) -> Iterator[Refusal]:
    text = config.train.stop_before
    try:
        _ = text in ("", "never") or datetime.fromisoformat(text)
    except ValueError:
        yield (f'train.stop_before must be a time such as "2026-11-22T18:00", or "never", found {toml(text)}',
               ("train.stop_before",))


def pruning(config: Config) -> Iterator[Refusal]:
    s = config.shrink
    if not s.prune:
        also = {"quantize", "least", "skip"} if s.quantize else {"quantize"}
        given = [key for key in keys_of("shrink") if key not in also and getattr(s, key) != getattr(ShrinkConfig, key)]
        if given:
            yield (f"shrink.{given[0]} is there, and nothing is pruned; set shrink.prune to {', '.join(map(toml, PRUNERS))}, or "
                   f"leave shrink.{given[0]} out", (f"shrink.{given[0]}", "shrink.prune"))
        return
    keys = ("shrink.sparsity", "shrink.prune")
    if s.prune == "n:m" and s.sparsity:
        yield f'shrink.sparsity = {s.sparsity} is not for "n:m", whose pattern is the share of zeros; leave it out', keys
    elif s.prune != "n:m" and not 0 < s.sparsity < 1:
        yield f"shrink.sparsity must lie in (0, 1), found {_written(s.sparsity)}", keys
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
    if a.alpha <= 0:
        yield f"lora.alpha must be more than 0, found {a.alpha}", ("lora.alpha",)
    if not a.layers:
        yield 'lora.layers must name a layer, such as "block*.attention.qkv", found []', ("lora.layers",)
    if config.mesh.tp > 1:
        yield (f"lora.rank = {a.rank} is not for mesh.tp = {config.mesh.tp}, which cuts the adapted weights; set mesh.tp = 1 and "
               "use mesh.dp or mesh.pp", ("lora.rank", "mesh.tp"))


def factors(config: Config) -> Iterator[Refusal]:
    if config.model.ranks and config.mesh.tp > 1:
        yield (f"model.ranks makes two layers of one, which mesh.tp = {config.mesh.tp} does not cut; set mesh.tp = 1 and use "
               "mesh.dp or mesh.pp", ("model.ranks", "mesh.tp"))


def teachers(config: Config) -> Iterator[Refusal]:
    """A teacher's outputs are compared with those of a whole model, as classes."""
    d, t = config.distil, config.train
    if not d.teacher:
        given = [key for key in keys_of("distil") if getattr(d, key) != getattr(DistilConfig, key)]
        if given:
            yield (f"distil.{given[0]} is there, and no teacher; set distil.teacher to a run folder, or leave distil.{given[0]} "
                   "out", (f"distil.{given[0]}", "distil.teacher"))
        return
    if d.temperature <= 0:
        yield f"distil.temperature must be more than 0, found {d.temperature}", ("distil.temperature",)
    if not 0 < d.weight <= 1:
        yield f"distil.weight must lie in (0, 1], found {d.weight}", ("distil.weight",)
    if t.loss != "cross_entropy" or "weight" in t.arguments:
        found = f'train.loss = "{t.loss}"' if t.loss != "cross_entropy" else "train.weight"
        yield (f'distil.teacher is for train.loss = "cross_entropy" without weights of classes, found {found}; change it',
               ("distil.teacher", "train.loss"))
    for axis in ("tp", "cp"):
        if (n := getattr(config.mesh, axis)) > 1:
            yield (f"distil.teacher compares whole outputs, and mesh.{axis} = {n} cuts them; set mesh.{axis} = 1",
                   ("distil.teacher", f"mesh.{axis}"))
    if t.device != "cpu":
        yield f'distil.teacher is for train.device = "cpu", found "{t.device}"', ("distil.teacher", "train.device")


VALUES = (texts, paths, length_of_the_run, numbers, intervals, lists, words, one_thread, finite, times, pruning, adapters,
          factors, teachers)


def _written(value: float | str) -> str:
    """A value as somebody wrote it: 0 for the 0.0 that it became."""
    return toml(value).removesuffix(".0")


def _is_finite(value: Any) -> bool:
    """Whether no number in a value, or in the lists and tables of it, is NaN or infinite."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _is_text(value: Any) -> bool:
    """Whether every word in a value is text: Python reads bytes of names that are no UTF-8 as lone surrogates."""
    if isinstance(value, dict):
        return all(map(_is_text, [*value, *value.values()]))
    if isinstance(value, (list, tuple)):
        return all(map(_is_text, value))
    return not isinstance(value, str) or not any("\ud800" <= c <= "\udfff" for c in value)


def _is_utf8(value: Any) -> bool:
    """Whether text was UTF-8 before a locale of another encoding made it none."""
    try:
        toml(value).encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        return False
    return True


def toml(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str):               # a TOML basic string is a JSON string but for two escapes JSON lacks
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
