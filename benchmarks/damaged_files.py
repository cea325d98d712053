"""Files with a random piece of damage, each read as a run reads it: is there an error that names the file, or the same data?

    python benchmarks/damaged_files.py                    # 20,000 files and the bombs; about 10 minutes
    python benchmarks/damaged_files.py --count 2000 --seed 5 --runs 4

Shards with checksums and without, their manifest, a checkpoint's part and its manifest: one bit flips, 16 bytes or a byte of the
metadata change, a field of 8 bytes becomes extreme, the end is cut off. A shard is examined by the child process that a run
uses, read whole by the offsets it gives, and its identity compared as a resumed run does. Then bombs are read, and `--runs` files
of a run on 2 ranks are damaged before it goes on from its checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/data"), str(ROOT / "tests/train")]

import h5py  # noqa: E402
import numpy as np  # noqa: E402
from damage import BOMBS, DAMAGE, change  # noqa: E402
from damaged_runs import damaged_runs  # noqa: E402
from data_inputs import CORPUS, features, in_chunks  # noqa: E402

from mpitrain.checkpoint import store  # noqa: E402
from mpitrain.checkpoint.manifest import load  # noqa: E402
from mpitrain.checkpoint.parts import Piece  # noqa: E402
from mpitrain.data import Dataset, Limits, describe, probe, write_shards  # noqa: E402
from mpitrain.data.content import difference, identity  # noqa: E402
from mpitrain.data.index import index  # noqa: E402
from mpitrain.errors import MpitrainError  # noqa: E402

ROWS, SLOW = 64, 20.0
MOST_MB, CHILD_MB = 256, 60                               # above the base; the child has so many before it opens a file
LIMITS = Limits(cpu_seconds=0.5)
SAME, REFUSED, NOTICED, SILENT, NAMELESS = "same data", "error", "seen by a resumed run alone", "silent", "names no file"


class KeptParser(probe.Parser):
    """One child for all files, a new one where it died; else 20,000 starts of Python take an hour."""

    kept: probe.Parser | None = None

    def __enter__(self) -> probe.Parser:
        kept = KeptParser.kept
        if kept is not None and kept.process is not None and kept.process.poll() is None:
            self.process, self.ready, self.received = kept.process, True, b""
        KeptParser.kept = self
        return self

    def __exit__(self, kind: Any = None, error: Any = None, trace: Any = None) -> None:
        busy = isinstance(error, MpitrainError) and "took more than" in str(error)
        if busy or self.process is None or self.process.poll() is not None:
            self.end()

    def end(self) -> None:
        super().__exit__()
        self.process, self.ready = None, False


@dataclass
class Specimen:
    """A file of a kind: `path` is damaged, `read` gives all that a run takes from it, `share` is how many in 100 it is."""

    name: str
    path: Path
    read: Callable[[], Any]
    share: int
    sums: bool = True                                         # whether checksums cover what is in it
    values: tuple[int, int] = (0, 0)                          # where its values lie, for damage beside them
    whole: bytes = b""
    right: Any = None
    found: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.whole, self.right = self.path.read_bytes(), self.read()

    def judge(self) -> tuple[str, str]:
        """What reading the damaged file came to, and the error."""
        try:
            found = self.read()
        except MpitrainError as error:
            named = str(error.file or "").startswith(str(self.path.parent)) or self.path.name in str(error)
            return (REFUSED if named else NAMELESS), str(error)
        if same(found["data"], self.right["data"]):
            return SAME, ""
        noticed = "identity" in found and difference(self.right["identity"], found["identity"])
        return (NOTICED if noticed else SILENT), ""


def same(one: Any, other: Any) -> bool:
    """Whether two nests of arrays and plain values are equal to the bit."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and one.shape == other.shape and (
            one.tobytes() == other.tobytes())
    if isinstance(one, (list, tuple)):
        return isinstance(other, type(one)) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def data_in(path: Path, limits: Limits = LIMITS) -> dict[str, Any]:
    """What a run takes from a file or folder of data."""
    description = describe(path, limits=limits)
    dataset = Dataset(description)
    values = dataset.read(np.arange(len(dataset)))
    dataset.close()
    about = [description[key] for key in ("kind", "classes", "vocabulary")]
    return {"data": [*about, *values], "identity": identity(description)}


def checkpoint_in(folder: Path) -> dict[str, Any]:
    """What a resumed run takes from a checkpoint."""
    found = store.named_rightly(load(folder))
    found.verify()
    return {"data": [found.step, json.dumps(found.meta, sort_keys=True), sorted(found.hashes.items()),
                     *(found.read(name) for name in sorted(found.arrays))]}


def plain(path: Path, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=features(ROWS, 12), **options)
        file.create_dataset("y", data=np.arange(ROWS) % 10, **({"chunks": (ROWS,), "fletcher32": True} if options else {}))
        file["x"].attrs["units"] = "m/s"
        file.attrs["text"] = "a simulation"
    return path


def specimens(folder: Path) -> list[Specimen]:
    x, y = features(ROWS, 12), (np.arange(ROWS) % 10).astype("u1")
    for name in ("shards", "chunks", "listed"):
        write_shards(folder / name, x, y, kind="classification", classes=[*"abcdefghij"], shard_rows=ROWS // 2)
    in_chunks(folder / "chunks")
    pieces = [Piece.whole("parameters/w", features(20, 30)), Piece.whole("optimizer/m/w", features(20, 30, seed=1))]
    parts, manifests = (store.save(folder / name, 7, pieces, {"seed": 3, "best": [0.5, 7]})
                        for name in ("parts", "manifests"))
    own, packed = folder / "shards/shard-00000.h5", folder / "chunks/shard-00001.h5"
    (folder / "indexed").mkdir()
    theirs = plain(folder / "indexed/a.h5", chunks=(16, 12), compression="gzip")
    index(theirs.parent)
    return [
        Specimen("shard with checksums", own, lambda: data_in(own.parent), 20, values=values_in(own)),
        Specimen("packed shard with checksums", packed, lambda: data_in(packed.parent), 10),
        Specimen("manifest of shards", folder / "listed/manifest.json", lambda: data_in(folder / "listed"), 10),
        Specimen("checkpoint's part", parts / "part-00000.h5", lambda: checkpoint_in(parts), 15),
        Specimen("checkpoint's manifest", manifests / "manifest.json", lambda: checkpoint_in(manifests), 10),
        Specimen("HDF5 with data index", theirs, lambda: data_in(theirs.parent), 10),
        bare(plain(folder / "plain.h5"), "plain HDF5", 15),
        bare(plain(folder / "packed.h5", chunks=(16, 12), compression="gzip", fletcher32=True), "plain HDF5, packed", 10)]


def bare(path: Path, name: str, share: int) -> Specimen:
    return Specimen(name, path, lambda: data_in(path), share, sums=False, values=values_in(path))


def values_in(path: Path) -> tuple[int, int]:
    """Where the values of x lie in a file that has them in one piece."""
    with h5py.File(path) as file:
        start = file["x"].id.get_offset()
        return (start, start + file["x"].nbytes) if start is not None else (0, 0)


def peak_mb(who: int = resource.RUSAGE_SELF) -> float:
    return resource.getrusage(who).ru_maxrss / 1024


class Survey:
    def __init__(self, folder: Path, seed: int):
        self.random = random.Random(seed)
        self.specimens = specimens(folder)
        self.wrong: list[str] = []
        self.slowest, self.base = 0.0, peak_mb()

    def damage(self, specimen: Specimen) -> None:
        kind = self.random.choice([*DAMAGE])
        damaged = DAMAGE[kind](specimen.whole, specimen.values, self.random)
        specimen.path.write_bytes(damaged)
        began = time.monotonic()
        outcome, why = specimen.judge()
        if outcome in (SILENT, NAMELESS) and KeptParser.kept is not None:          # an earlier file may have hurt the child
            KeptParser.kept.end()
            outcome, why = specimen.judge()
        seconds = time.monotonic() - began
        self.slowest = max(self.slowest, seconds)
        specimen.found[outcome] += 1
        specimen.found["crash of the child"] += "makes the HDF5 library crash" in why
        specimen.found["loop of the child"] += "keeps the HDF5 library busy" in why
        if outcome == NAMELESS or specimen.sums and outcome in (SILENT, NOTICED) or seconds > SLOW:
            self.wrong.append(f"{specimen.name}, {kind}: {outcome} {why} after {seconds:.1f} s "
                              f"{change(specimen.whole, damaged)}")

    def sweep(self, count: int) -> None:
        for specimen in self.specimens:
            n = count * specimen.share // 100
            for _ in range(n):
                self.damage(specimen)
            specimen.path.write_bytes(specimen.whole)
            found = {name: count for name, count in specimen.found.items() if count}
            print(f"{specimen.name:<30}{n:6} files  {found}", flush=True)

    def memory(self) -> None:
        """That of this process, and of the children that have parsed files."""
        if KeptParser.kept is not None:
            KeptParser.kept.end()
        here, child = peak_mb() - self.base, peak_mb(resource.RUSAGE_CHILDREN) - CHILD_MB
        print(f"the slowest took {self.slowest:.1f} s; most memory above the base: {here:.0f} MiB, {child:.0f} MiB in a child")
        if max(here, child) > MOST_MB:
            self.wrong.append("too much memory")

    def bombs(self, folder: Path) -> None:
        """Each must be refused in seconds, with little memory, and by name; so must the corpus that tests have."""
        made = {path.name: path for path in sorted(CORPUS.glob("*.h5"))}
        for name, make in BOMBS.items():
            made[name] = Path(apart(lambda make=make, name=name: str(make(folder / name.replace(" ", "-")))))      # type: ignore[misc]
        for name, path in made.items():
            said, seconds, here, child = json.loads(apart(lambda path=path: json.dumps(open_bomb(path))))          # type: ignore[misc]
            print(f"{name:<30}{seconds:5.1f} s {here:5.0f} MiB, {child:.0f} MiB in a child: {said[:150]}", flush=True)
            if max(here, child) > MOST_MB or seconds > SLOW or (said == "read") != ("may be read" in name):
                self.wrong.append(f"{name}: {said}")


def open_bomb(path: Path) -> tuple[str, float, float, float]:
    """What reading it came to, seconds, and the peak in MiB above the base of this process and of its children."""
    base, began = peak_mb(), time.monotonic()
    try:
        checkpoint_in(path) if (path / "part-00000.h5").exists() else data_in(path, Limits())
        said = "read"
    except MpitrainError as error:
        named = str(error.file or "").startswith(str(path))
        said = f"refused{'' if named else ', and not named'}: {error.message}"
    if KeptParser.kept is not None:
        KeptParser.kept.end()
    return said, time.monotonic() - began, peak_mb() - base, max(0.0, peak_mb(resource.RUSAGE_CHILDREN) - CHILD_MB)


def apart(work: Callable[[], str]) -> str:
    """What it returns, done in a process of its own."""
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writes, work().encode())
        os._exit(0)
    os.close(writes)
    with open(reads) as file:
        said = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--runs", type=int, default=14, help="damaged files given to whole runs")
    options = parser.parse_args()
    probe.Parser = KeptParser                                 # type: ignore[misc]
    with tempfile.TemporaryDirectory() as name:
        survey = Survey(Path(name), options.seed)
        survey.sweep(options.count)
        survey.memory()
        survey.bombs(Path(name))
        survey.wrong += damaged_runs(Path(name) / "runs", options.runs, survey.random)
    print(*survey.wrong, sep="\n", end="\n" * bool(survey.wrong))
    total = sum(sum(s.found[o] for o in (SAME, REFUSED, NOTICED, SILENT, NAMELESS)) for s in survey.specimens)
    print(f"{total} damaged files: {len(survey.wrong)} wrong")
    sys.exit(bool(survey.wrong))


if __name__ == "__main__":
    main()
