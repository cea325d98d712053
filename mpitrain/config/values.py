"""Validation of single keys, and of pairs of keys on any mesh."""

from __future__ import annotations

import math
import os
import sys
import typing
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal

from mpitrain.config.energy_values import energy
from mpitrain.config.federated import workers
from mpitrain.config.messages import Refusal, toml, written
from mpitrain.config.private import privacy
from mpitrain.config.sections import POLICIES, SECTIONS, CommConfig, Config, keys_of
from mpitrain.config.shrink_sections import PRUNERS
from mpitrain.config.shrinking import SHRINKING
from mpitrain.errors import nearest

LARGEST_BUCKET_MB = 1 << 20              # a TiB: more than any model, and a number of bytes that is finite
LAYOUT = 'train.reproducible = "layout"'
LEAST = {"train.epochs": 0, "train.steps": 0, "train.batch_size": 1, "train.micro_batches": 0, "train.threads": 0,
         "train.eval_every": 0, "train.copy_every": 0, "data.stride": 1, "data.workers": 0, "mesh.pp": 1, "mesh.dp": 0,
         "mesh.ep": 1, "mesh.site": 1, "mesh.cp": 1, "mesh.tp": 1, "mesh.chunks": 1, "log.every": 1, "checkpoint.every": 0,
         "checkpoint.keep": 1, "optimizer.warmup_steps": 0, "run.seed": 0, "lora.rank": 0,
         "shrink.begin": 0, "shrink.end": 0, "shrink.every": 1, "shrink.least": 0,
         "stop.patience": 0, "average.start": 0, "average.every": 1, "data.length": 0, "data.horizon": 1,
         "comm.compress_after": 0, "comm.compress_warmup": 0, "workers.count": 0, "workers.in_flight": 1, "workers.buffer": 1,
         "workers.staleness": 0}
NOT_NEGATIVE = ("optimizer.lr", "optimizer.clip_norm", "optimizer.weight_decay", "optimizer.min_lr", "optimizer.gamma",
                "train.cached_mb", "train.stall_s", "train.start_s", "log.progress_s",
                "stop.min_delta", "workers.discount", "workers.spread", "energy.cap_watts", "energy.clock_mhz",
                "energy.gpu_cap_watts", "energy.idle_watts", "energy.busy_watts")
WORDS: dict[str, Any] = {f"{name}.{key}": typing.get_args(hint) for name in SECTIONS for key, hint in keys_of(name).items()
         if typing.get_origin(hint) is Literal}
WORDS["comm.sharding"], WORDS["shrink.prune"] = POLICIES, ("", *PRUNERS)
OWN = ("comm.sharding", "shrink.prune")                 # keys that may name a user's own thing, too

PATHS = ("run.out", "data.path", "data.validation", "model.init_from", "optimizer.offload_folder", "distil.teacher",
         "distil.predictions", "energy.root")
LONGEST_NAME, LONGEST_PATH = 255, 4095   # bytes: NAME_MAX of all file systems but a few, which have less; PATH_MAX less its last
IN_A_RUN = 100                           # bytes of the longest path inside a run folder, and some to spare
BY_LOCALE = (f"has letters that this locale, whose encoding is {sys.getfilesystemencoding()}, has not: set LC_ALL=C.UTF-8, or "
             "PYTHONUTF8=1, so that it can be")


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
            yield f"{key} must be a finite number, 0 or more, found {written(value_of(config, key))}", (key,)
    size = config.comm.bucket_mb
    if not (size == "auto" if isinstance(size, str) else 0 < size <= LARGEST_BUCKET_MB):
        yield (f'comm.bucket_mb must be more than 0, at most {LARGEST_BUCKET_MB}, or "auto", found {written(size)}; '
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
    if t.micro_batches > t.batch_size and not config.workers.count and config.privacy.unit == "none":
        yield (f"train.micro_batches = {t.micro_batches} is more than the {t.batch_size} samples of train.batch_size",
               ("train.micro_batches", "train.batch_size"))


def averages(config: Config) -> Iterator[Refusal]:
    if not 0 <= config.average.decay < 1:
        yield f"average.decay must lie in [0, 1), found {config.average.decay}", ("average.decay",)


def inputs(config: Config) -> Iterator[Refusal]:
    """Inputs by name are arguments of the model's forward; `name` would be that of a transform."""
    x = config.data.x
    for name, dataset in x.items() if isinstance(x, dict) else ():
        if not name.isidentifier() or name == "name":
            yield f'data.x names an input "{name}", and a name is letters, digits and _, and not "name"', ("data.x",)
        if not isinstance(dataset, str) or not dataset:
            yield f"data.x.{name} must be the name of a dataset, found {toml(dataset)}", ("data.x",)


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
    if config.workers.count and t.threads > 1:
        yield (f"[workers] needs one BLAS thread a rank, so that a worker has the same bits wherever it is, found "
               f"train.threads = {t.threads}; set it to 0 or 1", ("workers.count", "train.threads"))
    if t.precision == "bfloat16" and t.device != "gpu" and t.threads > 1:
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


VALUES = (texts, paths, length_of_the_run, numbers, intervals, lists, inputs, averages, words, one_thread, finite, times,
          workers, privacy, energy, *SHRINKING)


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
