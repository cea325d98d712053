"""What a data file or folder holds, learned without letting libhdf5 near a rank.

Metadata is parsed by a child process with limits (`files.parser_child`); a file that crashes or hangs libhdf5 costs that child
and gets a clear refusal. One rank calls `describe` before MPI starts; its result is plain JSON-able data for the rest.
"""

from __future__ import annotations

import json
import math
import os
import resource
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.columns import Asked, inputs_of, labelled, labels_of, named_as
from mpitrain.data.content import sampled_sha256
from mpitrain.data.found import BUILT_IN, DENIED, check_file, find_files
from mpitrain.data.manifest import MANIFEST, match_manifest
from mpitrain.data.names import names_of, refuse_other_names
from mpitrain.data.storage import reading
from mpitrain.errors import DataError, StorageError
from mpitrain.files.parser import start_parser

ENOUGH = 3 << 29                # The parser never needs more bytes of address space: 1 GiB for a file, the rest for itself.
MAX_ANSWER = 1 << 28            # A description has at most so many bytes: about four million chunks.


@dataclass(frozen=True)
class Limits:
    """What the parser may spend on one file: processor seconds, and seconds on the clock (a slow file system waits)."""

    cpu_seconds: float = 3.0
    seconds: float = 60.0
    start_seconds: float = 120.0


def describe(path: Path | str, *, x: Asked | None = None, y: str | None = None, limits: Limits = Limits(),  # noqa: B008
             parser: Parser | None = None, apart: Path | None = None, series: bool = False) -> dict[str, Any]:
    """The description of a dataset: a plain HDF5 file, a folder of shards (with a manifest or without), or a built-in name.

    `x` and `y` name datasets inside the file, `x` perhaps several, by the names of the model's inputs; without them a manifest
    says, or the only sensible choice is taken. A bare name of a built-in set means that set ("./digits" is the folder). The
    result holds, in plain JSON types, `kind` ("classification", "regression", "tokens" or "series"), and per file its size, time
    stamp and where the values of x and y lie.
    With `series` the kind is "series", of a dataset alone. `parser` is asked, within its `with` block, in place of one with these
    `limits`. `apart` is a file with another use, such as validation, which may lie in the folder unlisted.

    Raises MissingError, AccessError, or DataError naming file and dataset: not HDF5, damaged, values in other files,
    a type or filter that is not read, shards that do not fit each other or the manifest, a file that would be left out.
    """
    root = BUILT_IN.get(str(path)) or Path(path)
    files, manifest = find_files(root, apart)
    if manifest is not None:
        x, y = x or manifest["x"], y or (manifest["y"] if x in (None, manifest["x"]) else None)
        series = series or manifest["kind"] == "series"
    elif y is not None and x is None:
        raise DataError(f'data.y="{y}" is given without data.x; name both', file=root)
    shards = []
    with Parser(limits) if parser is None else nullcontext(parser) as asked:
        for file in files:
            size, changed = check_file(file)
            found = asked.ask(file, x, y)
            x, y = named_as(found), found["y"] and found["y"]["name"]
            shards.append({"file": str(file.absolute()), "size": size, "mtime_ns": changed, **found})
    check_agreement(shards)
    description = {"path": str(path), "host": socket.gethostname(), "x": x, "y": y, "kind": kind_of(shards[0], series),
                   "shards": shards,
                   "vocabulary": None, "classes": None}
    if manifest is not None:
        match_manifest(description, manifest, root / MANIFEST)
    for shard in shards:
        if not all("sha256" in shard[label] for label in labels_of(shard)):
            shard["sample"], shard["sampled_among"] = sample_file(Path(shard["file"]), shard["size"], len(shards)), len(shards)
    return description


def sample_file(path: Path, size: int, n_files: int) -> str:
    """`content.sampled_sha256` of a file by its name."""
    with reading(path, "the data file is not there", DENIED, "reading the data failed"):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return sampled_sha256(fd, size, n_files)
        finally:
            os.close(fd)


def kind_of(shard: dict[str, Any], series: bool = False) -> str:
    """What the shapes and types of a file say it is for; raises DataError where they say nothing sensible."""
    x, y = shard[inputs_of(shard)[0]], shard["y"]
    if series and (y is not None or "x" not in shard):
        raise DataError("data.length cuts windows out of the series of one dataset, whose columns data.targets are predicted; "
                        "name that dataset alone, with data.x", file=shard["file"], dataset=x["name"])
    if series:
        return "series"
    if y is None:
        if "x" in shard and len(x["shape"]) == 1 and np.dtype(x["dtype"]).kind in "iu":
            return "tokens"
        raise DataError(f'there are no targets: set data.y to the dataset that "{x["name"]}" should predict (only a 1-D dataset '
                        f"of integers, tokens, stands alone, and series, with data.length)", file=shard["file"],
                        dataset=x["name"])
    if np.dtype(y["dtype"]).kind == "f":
        return "regression"
    return "classification"


def check_agreement(shards: Sequence[dict[str, Any]]) -> None:
    """Every shard has the dtype and row shape of the first, and as many rows of each input as of y."""
    first = shards[0]
    for shard in shards:
        for label in labels_of(first):
            want, have = first[label], shard[label]
            if (want["dtype"], want["shape"][1:]) != (have["dtype"], have["shape"][1:]):
                raise DataError(f"rows of {np.dtype(have['dtype'])} {_shape(have, 1)}, but the first shard "
                                f"({Path(first['file']).name}) has rows of {np.dtype(want['dtype'])} {_shape(want, 1)}",
                                file=shard["file"], dataset=have["name"])
        x, *others = (shard[label] for label in labels_of(shard))
        for other in others:
            if x["shape"][0] != other["shape"][0]:
                needs = "each input needs one target" if other is shard["y"] else "a sample is a row of each"
                raise DataError(f"{x['shape'][0]} rows in \"{x['name']}\", but {other['shape'][0]} in \"{other['name']}\"; "
                                f"{needs}", file=shard["file"], dataset=other["name"])


def check_validation(training: Mapping[str, Any], validation: Mapping[str, Any]) -> None:
    """DataError unless validation rows have the shapes of training rows, integers as targets where those have, and numbers that
    stand for the same classes, words and categories."""
    first, file = training["shards"][0], validation["shards"][0]
    for label in [*inputs_of(first), "y"]:
        want, have = first.get(label), file.get(label)
        if want is None and have is None:
            continue
        if want is None or have is None:
            raise DataError(f"there are {'no targets' if have is None else 'targets'}, and {'' if want else 'no '}targets in the "
                            f"training data ({Path(first['file']).name}); data.x and data.y name datasets of both",
                            file=file["file"])
        wanted, found = np.dtype(want["dtype"]), np.dtype(have["dtype"])
        if want["shape"][1:] != have["shape"][1:] or label == "y" and (wanted.kind == "f") != (found.kind == "f"):
            raise DataError(f"rows of {found} {_shape(have, 1)}, but the training data ({Path(first['file']).name}) have rows of "
                            f"{wanted} {_shape(want, 1)}; data.validation must have rows like them", file=file["file"],
                            dataset=have["name"])
    refuse_other_names(names_of(training), names_of(validation), file["file"])


def _shape(dataset: dict[str, Any], start: int = 0) -> str:
    return "x".join(map(str, dataset["shape"][start:])) or "scalar"


class Parser:
    """The child process, given or started when first asked, and ended with the `with` block; it answers file by file."""

    def __init__(self, limits: Limits = Limits(), process: subprocess.Popen[bytes] | None = None):  # noqa: B008
        self.limits, self.process, self.ready = limits, process, False
        self.received = b""

    def __enter__(self) -> Parser:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdin is not None and self.process.stdout is not None
            with suppress(BrokenPipeError):                  # what it has not read is still to be written
                self.process.stdin.close()
            self.process.stdout.close()

    def ask(self, file: Path, x: Asked | None, y: str | None, *, attributes: bool = False) -> dict[str, Any]:
        """Where the values of `x` and `y` lie; with `attributes` also the texts that the file has as such."""
        if not self.ready:
            self._start(file)
        datasets = {} if x is None else labelled(x, y)
        reply = self._exchange({"file": str(file.absolute()), "datasets": datasets, "attributes": attributes,
                                "cpu_seconds": self.limits.cpu_seconds}, self.limits.seconds, file)
        if "refused" in reply:
            if reply.get("memory"):
                self._blame_the_limit(file)
            raise DataError(reply["refused"], file=file, dataset=reply["dataset"])
        return check_reply(reply, file)

    def _start(self, file: Path) -> None:
        self.process = self.process or start_parser()
        reply = self._reply(self.limits.start_seconds, file)
        if not reply["ready"]:
            self._blame_the_limit(file)
            raise StorageError(f"the process that reads HDF5 metadata could not import h5py: {reply['message']}", file=file)
        self.ready = True

    def _exchange(self, request: dict[str, Any], seconds: float, file: Path) -> dict[str, Any]:
        """One line out, one line in."""
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._died(file) from None
        return self._reply(seconds, file)

    def _reply(self, seconds: float, file: Path) -> dict[str, Any]:
        """One line in; a child that dies, or says nothing for `seconds`, refuses `file`."""
        assert self.process is not None and self.process.stdout is not None
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            parts = [self.received]
            while b"\n" not in parts[-1]:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise DataError(f"reading its metadata took more than {seconds:g} s, so the file is refused; it is damaged, "
                                    f"or the file system does not answer", file=file)
                part = os.read(self.process.stdout.fileno(), 1 << 20)
                parts.append(part)
                if not part:
                    raise self._died(file)
                if sum(map(len, parts)) > MAX_ANSWER:
                    raise DataError(f"its chunk index is larger than {MAX_ANSWER >> 20} MiB; repack it with larger chunks "
                                    f"(h5repack)", file=file)
        line, _, self.received = b"".join(parts).partition(b"\n")
        reply = json.loads(line)
        assert isinstance(reply, dict)
        return reply

    def _blame_the_limit(self, file: Path) -> None:
        """MemoryError where the job's own limit on address space left the process less than it may have."""
        allowed = resource.getrlimit(resource.RLIMIT_AS)[1]
        if allowed != resource.RLIM_INFINITY and allowed < ENOUGH:
            raise MemoryError(f"the process that reads the metadata of {file.name} has no memory left below the limit on address "
                              f"space, {allowed >> 20} MiB (ulimit -v); raise it, to {ENOUGH >> 20} MiB or more")

    def _died(self, file: Path) -> DataError | StorageError:
        assert self.process is not None
        before = _processor_seconds()
        status = self.process.wait()
        allowed = resource.getrlimit(resource.RLIMIT_CPU)[1 if self.ready else 0]      # once ready, it has a soft one of its own
        if allowed != resource.RLIM_INFINITY and _processor_seconds() - before > allowed - 0.5:
            return StorageError(f"the process that reads the metadata of {file.name} was ended by the limit on processor time, "
                                f"{allowed} s (ulimit -t); raise it", file=file)
        if status != -signal.SIGXCPU:
            self._blame_the_limit(file)
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        if not self.ready:
            return StorageError(f"the process that reads HDF5 metadata ended before it could import h5py ({name}); try "
                                f'"python -c \'import h5py\'"', file=file)
        how = (f"keeps the HDF5 library busy for more than {self.limits.cpu_seconds:g} s" if status == -signal.SIGXCPU
               else f"makes the HDF5 library crash ({name})")
        return DataError(f"{how}, so the file is refused; it is damaged or hostile", file=file)


def _processor_seconds() -> float:
    """What children that have ended, and were waited for, have taken."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def check_reply(reply: dict[str, Any], file: Path) -> dict[str, Any]:
    """The child read a hostile file, so what it says about places and sizes is checked once more before anyone maps it."""
    size = file.stat().st_size
    for label in labels_of(reply):
        found = reply[label]
        dtype, shape = np.dtype(found["dtype"]), found["shape"]
        ok = dtype.kind in "biuf" and dtype.itemsize <= 8 and all(type(n) is int and n > 0 for n in shape)
        if found["storage"] == "contiguous":
            ok = ok and 0 <= found["offset"] <= size - math.prod(shape) * dtype.itemsize
        elif found["storage"] == "chunked":
            ok = ok and all(0 <= o <= size - n for o, n in zip(found["offsets"], found["sizes"]))
        if not ok:
            raise DataError("its metadata contradicts itself; it is damaged or hostile", file=file, dataset=found["name"])
    return reply
