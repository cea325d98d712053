"""Is a run that goes on still the same experiment? Its record, which is in each checkpoint, and what has changed since.

Every key of the configuration is in one of four classes. Those that decide which rows a step sees may not change in the middle
of a run unless the user allows it; those that change the arithmetic may, and are told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from mpitrain.backend.cpu import cpu_info
from mpitrain.config import Config
from mpitrain.config.messages import toml
from mpitrain.config.sections import SECTIONS, keys_of
from mpitrain.config.values import value_of
from mpitrain.data import is_file
from mpitrain.data.content import difference, identity
from mpitrain.data.names import KINDS, names_of, refuse_other_names
from mpitrain.errors import UsageError, nearest
from mpitrain.files.disk import file_sha256
from mpitrain.registry import source_of


def keys(**sections: str) -> frozenset[str]:
    return frozenset(f"{section}.{key}" for section, names in sections.items() for key in names.split())


ROWS = keys(                                     # These decide the order of the samples, or which rows train.
    run="seed", model="block", train="batch_size",
    data="validation transform target_transform augment stride length horizon targets drop_last", workers="count rows")
ARITHMETIC = keys(                               # These change what is computed from the same rows. So do all further keys.
    model="name shapes formats ranks", train="loss label_smoothing device precision micro_batches on_nan",
    comm="wire_dtype compress compress_feedback compress_after compress_warmup compress_force compress_parameters",
    optimizer="name lr min_lr momentum nesterov betas eps weight_decay decay clip_norm schedule warmup_steps milestones gamma "
              "groups offload",
    shrink="prune sparsity pattern scope begin end every rewind skip products quantize least",
    lora="rank alpha layers", distil="teacher temperature weight", average="kind decay warmup start every",
    sync="levels", workers="each_round drop weights correct arrival in_flight buffer staleness discount spread",
    privacy="unit clip noise epsilon delta accountant sampling by_row secure threshold")
ELSEWHERE = keys(                                # These are compared by their effect: data, learning rates, numerics, exchange.
    data="path x y", distil="predictions", train="steps epochs reproducible threads", comm="algorithm")
FREE = keys(                                     # These change no result, or only its rounding, as other ranks do.
    run="name out folder", model="init_from", data="workers", optimizer="offload_folder",
    train="metrics eval_every compare_every on_lost copy_every stop_before recompute graph cached_mb stall_s start_s stall",
    mesh="site pp dp ep cp tp schedule chunks stages plan sequence",
    comm="bucket_mb library device_buffers progress node_shared sharding",
    checkpoint="every keep best best_metric asynchronous on_error",
    stop="patience metric min_delta mode", average="evaluate",
    energy="source root period_ms idle_watts busy_watts carbon_g_per_kwh pue cap_watts clock_mhz gpu_cap_watts",
    log="every progress_s tensorboard observers machine")
USER_CODE = ("model.name", "model.formats", "data.transform", "data.target_transform", "data.augment", "optimizer.name",
             "optimizer.schedule", "train.loss", "train.metrics", "mesh.schedule", "comm.algorithm", "comm.sharding",
             "shrink.prune", "shrink.quantize", "comm.compress", "sync.levels", "workers.rows", "workers.correct",
             "privacy.accountant")
DATA, NUMERICS = "data", "numerics"              # `--change` calls the content of the data files so, and what bits depend on
PROBES = 16                                      # learning rates of so many steps to come are compared

RateOf: TypeAlias = Callable[[int], Callable[[int], float]]       # number of steps -> step -> learning rate


class Change(NamedTuple):
    """A difference between a run and its checkpoint; `text` tells it, and `moves_rows` if it is one of the first class."""

    key: str
    was: Any
    now: Any
    moves_rows: bool
    text: str


def record(config: Config, files: Mapping[str, Any], about: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """The record of a run of so many steps, plain JSON; rank 0 makes it of the described `files` and of run.json's `about`."""
    found = {"keys": dict(compared_keys(config)), "steps": steps, "layout": config.train.reproducible == "layout",
             "code": {key: sums for key in USER_CODE if (sums := code_of(config, key))},
             "data": identities(files), "numerics": numerics(about)}
    return dict(json.loads(json.dumps(found)))


def identities(files: Mapping[str, Any]) -> dict[str, Any]:
    return {name: identity(description) for name, description in files.items()}


def refuse_other_names_than(was: Mapping[str, Any], files: Mapping[str, Any], kinds: Sequence[str] = KINDS) -> None:
    """DataError where a class, a token or a category of described `files` has another number than in the training data of a
    checkpoint's record."""
    names = was["data"]["training"].get("names") or {}
    for name in ("training", "validation"):
        if name in files:
            refuse_other_names(names, names_of(files[name]), files[name]["shards"][0]["file"], kinds)


def compared_keys(config: Config) -> Iterator[tuple[str, Any]]:
    """Each key of the first two classes with its value; a validation set in a file is compared as data."""
    for section in SECTIONS:
        values = {f"{section}.{key}": value_of(config, f"{section}.{key}") for key in keys_of(section)}
        values |= {f"{section}.{key}": value for key, value in getattr(getattr(config, section), "arguments", {}).items()}
        for key, value in values.items():
            if key not in ELSEWHERE and key not in FREE:
                yield key, "a path" if key == "data.validation" and is_file(value) else value


def code_of(config: Config, key: str) -> dict[str, str]:
    """SHA-256 of each file with code of the user's that a key names, by the file's name."""
    value = value_of(config, key)
    values = list(value.values()) if key == "model.formats" else value if isinstance(value, (list, tuple)) else [value]
    for entry in [entry for entry in values if isinstance(entry, dict) and "name" not in entry]:       # a table by input
        values = [*values, *(one for own in entry.values() for one in (own if isinstance(own, list) else [own]))]
    names = [entry.get("name") if isinstance(entry, dict) else entry for entry in values]
    files = [source_of(name, config.folder) for name in names if isinstance(name, str)]
    return {file.name: file_sha256(file)[:32] for file in files if file is not None}


def numerics(about: Mapping[str, Any]) -> dict[str, Any]:
    """What bits depend on besides, as far as it costs nothing to know; `reproducible = "layout"` has a whole fingerprint."""
    libraries = [library for library in about["blas"] if library.get("internal_api") != "openmp"]
    return {"ranks": about["ranks"], "machine": about["machine"], "cpu": cpu_info().get("model name", ""),
            **{name: about["versions"].get(name, "") for name in ("mpitrain", "numpy", "numba")},
            "blas": "; ".join(" ".join(str(library.get(key, "")) for key in ("internal_api", "version", "architecture"))
                              for library in libraries),
            "blas_threads": str(about["threads"])}


def changes(was: Mapping[str, Any], now: Mapping[str, Any], step: int, rate: RateOf) -> list[Change]:
    """What differs between the record of the checkpoint of a `step` and the run's own; `rate(steps)` is its learning rate."""
    return [*_of_keys(was, now, step), *_of_code(was, now, step), *changes_of_data(was, now), *_of_steps(was, now, step, rate),
            *_of_numerics(was, now)]


def _of_keys(was: Mapping[str, Any], now: Mapping[str, Any], step: int) -> Iterator[Change]:
    before, after = was["keys"], now["keys"]
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key), after.get(key)
        if old == new or (key not in before and key in ROWS | ARITHMETIC) or key in ELSEWHERE | FREE:
            continue                             # an older version had no such key, or this one compares it in another way
        moves = key in ROWS or (key == "train.micro_batches" and was["layout"] and now["layout"])
        yield Change(key, old, new, moves, f"{key} was {shown(old)} until step {step}, is {shown(new)}")


def _of_code(was: Mapping[str, Any], now: Mapping[str, Any], step: int) -> Iterator[Change]:
    for key, files in now["code"].items():
        for name, sha256 in files.items():
            old = was["code"].get(key, {}).get(name, sha256)
            if old != sha256:
                yield Change(key, old, sha256, False, f"the code of {key}, {name}, is not that of step {step}: sha256 "
                                                      f"{old[:8]}.. then, {sha256[:8]}.. now")


def changes_of_data(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """What differs between the files of two records."""
    both = [(name, was["data"][name], files) for name, files in now["data"].items() if name in was["data"]]
    return [Change(DATA, before["sha256"], after["sha256"], True, f"the {name} data are not the checkpoint's: {said}")
            for name, before, after in both if (said := difference(before, after))]


def _of_steps(was: Mapping[str, Any], now: Mapping[str, Any], step: int, rate: RateOf
              ) -> Iterator[Change]:
    """Another length of the run is a change where the learning rate follows it."""
    old, new = was["steps"], now["steps"]
    if old == new:
        return
    end = min(old, new)
    probes = {step + (end - 1 - step) * i // (PROBES - 1) for i in range(PROBES)} if end > step else {step}
    before, after = rate(old), rate(new)
    if any(before(at) != after(at) for at in probes):
        yield Change("train.steps", old, new, False, f"the run had {old} steps until step {step}, has {new}, and its learning "
                                                     "rates follow them")


def _of_numerics(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    if was["layout"] or now["layout"]:
        return                                   # its fingerprint is compared then
    before, after = dict(was["numerics"]), dict(now["numerics"])
    if before.pop("ranks") != after.pop("ranks"):
        before["blas_threads"] = after["blas_threads"]      # ranks share cores out
    others = [name for name in after if before.get(name) != after[name]]
    if others:
        from mpitrain.train.machine import fingerprint
        yield Change(NUMERICS, {name: before.get(name) for name in others}, {name: after[name] for name in others}, False,
                     fingerprint.changes(before, after))


def refuse_unknown(names: Sequence[str]) -> None:
    """UsageError for a name of `--change` that is no key whose change would be noticed."""
    further = tuple(f"{section}." for section in ("model", "optimizer", "train"))
    known = [*ROWS, *ARITHMETIC, DATA, "train.steps", NUMERICS]
    for name in names:
        if name not in known and (name in FREE | ELSEWHERE or not name.startswith(further)):
            raise UsageError(f'--change names a key that may not change without it, found "{name}"{nearest(name, known)}; '
                             f'"{DATA}" is the content of the data files')


def shown(value: Any) -> str:
    """A value as TOML, cut off where it is long."""
    text = "not given" if value is None else toml(value)
    return text if len(text) <= 60 else text[:57] + "..."
