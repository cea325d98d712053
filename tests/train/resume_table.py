"""A run that goes on with something changed, in many ways: `main` tries them all on the ranks of one job and prints what came.

    python resume_table.py FOLDER
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

TEXT = """
[model]
name = "net.py:net"
[data]
path = "data.h5"
transform = ["standardise"]
[optimizer]
name = "adamw"
lr = 0.1
[train]
steps = 8
batch_size = 12
[checkpoint]
every = 4
keep = 9
best = false
"""
NET = """
from mpitrain import nn

def net(hidden=8):
    return nn.Sequential(("first", nn.Linear(6, hidden)), ("act", nn.ReLU()), ("second", nn.Linear(hidden, 3)))
"""


class Case(NamedTuple):
    """`code` "": the run goes on, and tells a line with each text of `said`, or no line if there is none; else its error."""

    name: str
    overrides: str = ""
    code: str = ""
    said: tuple[str, ...] = ()
    change: tuple[str, ...] = ()
    strict: bool = False
    prepare: str = ""


CASES = (
    Case("unchanged"),
    Case("unchanged, strict", strict=True),
    Case("longer, other intervals", "train.steps=12 log.every=1 checkpoint.every=2 train.eval_every=3 data.workers=0"),
    Case("seed", "run.seed=7", "E_CONFIG", ("run.seed was 0 until step 8, is 7", "--change run.seed", "step-00000008")),
    Case("seed, allowed", "run.seed=7", said=("run.seed was 0 until step 8, is 7",), change=("run.seed",)),
    Case("split", "data.validation=0.5", "E_CONFIG", ("data.validation was 0.2 until step 8, is 0.5",)),
    Case("batch", "train.batch_size=24", "E_CONFIG", ("train.batch_size was 12",)),
    Case("two", "train.batch_size=24 run.seed=7", "E_CONFIG", ("run.seed was 0", "train.batch_size was 12",
                                                              "--change run.seed --change train.batch_size")),
    Case("two, one allowed", "train.batch_size=24 run.seed=7", "E_CONFIG", ("train.batch_size was 12",), change=("run.seed",)),
    Case("transform", "data.transform=scale", "E_CONFIG", ('data.transform was ["standardise"]',)),
    Case("drop_last", "data.drop_last=false", "E_CONFIG", ("data.drop_last was true",)),
    Case("rate", "optimizer.lr=0.5", said=("optimizer.lr was 0.1 until step 8, is 0.5",)),
    Case("rate, strict", "optimizer.lr=0.5", "E_CONFIG", ("--strict", "optimizer.lr was 0.1"), strict=True),
    Case("rate, strict, allowed", "optimizer.lr=0.5", said=("optimizer.lr was 0.1",), change=("optimizer.lr",), strict=True),
    Case("clip and schedule", "optimizer.clip_norm=1 optimizer.schedule=cosine", said=(
        "optimizer.clip_norm was 0.0", 'optimizer.schedule was "constant"', "the run had 8 steps until step 8, has 12")),
    Case("loss", "train.label_smoothing=0.1", said=("train.label_smoothing was 0.0",)),
    Case("another rule", "optimizer.name=sgd optimizer.lr=0.5", "E_CHECKPOINT", (
        ': optimizer.name was "adamw" until step 8, is "sgd"; optimizer.lr was 0.1 until step 8, is 0.5: the checkpoint is of',
        "another model: 4 missing (optimizer/momentum/first.weight", "use the config it was saved with")),
    Case("precision", "train.precision=float64 train.label_smoothing=0.1", "E_CHECKPOINT", (
        ': train.precision was "float32" until step 8, is "float64": the checkpoint is of another model: ',)),
    Case("another width", "model.hidden=9", "E_CHECKPOINT", (": model.hidden was not given until step 8, is 9: ",)),
    Case("masks", "shrink.prune=magnitude shrink.sparsity=0.5", "E_CHECKPOINT", (
        ': shrink.prune was "" until step 8, is "magnitude"; shrink.sparsity was 0.0 until step 8, is 0.5: the checkpoint is of',
        "another model: 2 missing (mask/first.weight, mask/second.weight)")),
    Case("code", said=("the code of model.name, net.py, is not that of step 8",), prepare="other_code"),
    Case("moved file, the same bytes", "data.path=elsewhere/copy.h5"),
    Case("other data", "data.path=other.h5", "E_DATA_CHANGED", ("the training data", '"other.h5"', "--change data")),
    Case("other data, allowed", "data.path=other.h5", said=("the training data",), change=("data",)),
    Case("moved address", "data.path=moved.h5", "E_DATA_CHANGED", ("address of x was 2048, is 2050",)),
    Case("one bit", "data.path=flipped.h5", "E_DATA_CHANGED", ("its bytes are others",)),
    Case("another run's checkpoint", code="E_CHECKPOINT", said=("of another run", "step-00000012"), prepare="foreign"),
    Case("before there were records", said=("written before runs kept a record of their experiment: not compared",),
         prepare="no_record"),
    Case("before there were records, strict", code="E_CHECKPOINT", said=("not compared",), strict=True, prepare="no_record"),
    Case("a damaged record", code="E_CHECKPOINT", said=("its record of the experiment is damaged",), prepare="bad_record"),
    Case("damaged", prepare="damaged"),
    Case("damaged, strict", code="E_CHECKPOINT", said=("--strict", "step-00000008"), strict=True, prepare="damaged"),
    Case("a renamed folder", prepare="renamed"),
    Case("a renamed folder, strict", code="E_CHECKPOINT", said=("--strict", "step-00000099"), strict=True, prepare="renamed"),
    Case("other numerics", said=('the bits from here on may differ: numpy was "1.0"',), prepare="other_numerics"),
    Case("other numerics, strict", code="E_DESYNC", said=('numpy was "1.0"',), strict=True, prepare="other_numerics"),
)


def write(folder: Path) -> None:
    (folder / "run.toml").write_text(TEXT)
    (folder / "net.py").write_text(NET)
    data(folder / "data.h5", seed=1)
    data(folder / "other.h5", seed=2)
    image = bytearray((folder / "data.h5").read_bytes())
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/copy.h5").write_bytes(image)
    image[3000] ^= 1
    (folder / "flipped.h5").write_bytes(image)
    image[3000] ^= 1
    place = image.index(struct.pack("<Q", 2048))
    image[place:place + 8] = struct.pack("<Q", 2050)         # as one flipped bit of a header does it
    (folder / "moved.h5").write_bytes(image)


def data(path: Path, seed: int) -> None:
    import h5py
    import numpy as np
    random = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        file["x"] = random.standard_normal((200, 6)).astype("f4")
        file["y"] = random.integers(0, 3, 200)


# Each of these changes the copy of a run before it goes on.

def other_code(run: Path) -> None:
    """Programs import a file once: the record of the checkpoint is changed, not the file."""
    def change(meta: dict[str, Any]) -> None:
        meta["experiment"]["code"]["model.name"]["net.py"] = "0" * 32
    rewrite(run, change)


def foreign(run: Path) -> None:
    shutil.copytree(run.parent / "another/checkpoints/step-00000012", run / "checkpoints/step-00000012")


def no_record(run: Path) -> None:
    def change(meta: dict[str, Any]) -> None:
        for key in ("experiment", "id", "changes"):
            del meta[key]
    rewrite(run, change)


def bad_record(run: Path) -> None:
    def change(meta: dict[str, Any]) -> None:
        meta["experiment"] = {"keys": 3}
    rewrite(run, change)


def other_numerics(run: Path) -> None:
    def change(meta: dict[str, Any]) -> None:
        meta["experiment"]["numerics"]["numpy"] = "1.0"
    rewrite(run, change)


def damaged(run: Path) -> None:
    part = run / "checkpoints/step-00000008/part-00000.h5"
    part.write_bytes(part.read_bytes()[:-1])


def renamed(run: Path) -> None:
    shutil.copytree(run / "checkpoints/step-00000004", run / "checkpoints/step-00000099")


def rewrite(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from mpitrain.files.signed import body_sha256
    path = run / "checkpoints/step-00000008/manifest.json"
    body = json.loads(path.read_text())
    body.pop("sha256")
    change(body["meta"])
    path.write_text(json.dumps({**body, "sha256": body_sha256(body)}))


def main(folder: Path) -> None:
    from mpitrain import MpitrainError, Run, load_config, start
    from mpitrain.run.session import look_at_files
    from mpitrain.train import Observer
    looked = {path.name: look_at_files(load_config(folder / "run.toml", [f"data.path={path}"])) for path in folder.rglob("*.h5")
              if "checkpoints" not in path.parts}
    world = start().comm

    class Listener(Observer):
        def __init__(self) -> None:
            self.told: list[str] = []

        def message(self, text: str) -> None:
            self.told.append(text)

    def one(name: str, overrides: list[str], **options: Any) -> dict[str, Any]:
        listener = Listener()
        config = load_config(folder / "run.toml", [f"run.out={folder / name}", *overrides])
        run = Run(config, world, quiet=True, files=lambda: looked[Path(config.data.path).name])
        try:
            trained = run.train(observers=[listener], **options)
            found = {"code": "", "exit": 0, "message": "", "sha256": trained.hashes["parameters_sha256"]}
        except MpitrainError as error:
            found = {"code": error.code, "exit": error.exit_code, "message": str(error)}
        run.close()
        return {**found, "told": listener.told}

    for name, overrides in (("base", []), ("another", ["run.seed=3", "train.steps=12"]), ("whole", ["train.steps=12"])):
        one(name, overrides)
    results = []
    for number, case in enumerate(CASES):
        name = f"case-{number}"
        if world.rank == 0:
            shutil.copytree(folder / "base", folder / name)
            if case.prepare:
                globals()[case.prepare](folder / name)
        world.Barrier()
        found = one(name, ["train.steps=12", *case.overrides.split()], resume="latest", change=case.change, strict=case.strict)
        results.append({**found, "run": name})
    if world.rank == 0:
        print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
