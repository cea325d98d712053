"""Small runs of every optimizer on communicators of 1, 2 and 3 ranks of one job; rank 0 prints the hashes, a line each.

    mpirun -n 3 python optimizers_program.py FOLDER NAME[:SETTING...] ...
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import examined  # noqa: E402

from mpitrain import MpitrainError, Process, Run, load_config, start  # noqa: E402

process, world = Process(), start().comm
MODES = {"whole": (), "slices": ("comm.sharding=optimizer",), "node": ("comm.node_shared=true",)}
IN_RUN = {"whole": (), "gradients": ("comm.sharding=gradients",), "parameters": ("comm.sharding=parameters",)}     # of two ranks
SHAPE = ("model.name=mlp", "model.inputs=64", "model.hidden=[24]", "model.outputs=10", "data.path=digits",
         "data.validation=0.05", "train.epochs=0", "train.batch_size=48", "train.micro_batches=6", "train.reproducible=layout",
         "optimizer.schedule=constant", "optimizer.clip_norm=0", "comm.bucket_mb=0.002", "log.progress_s=0")


def hash_of(folder: str, comm: object, *settings: str, resume: str | None = None) -> str:
    config = load_config(None, [*SHAPE, f"run.out={folder}", *settings])
    run = Run(config, comm, process=process, quiet=True)
    try:
        return str(run.train(resume=resume, overwrite=resume is None).hashes["parameters_sha256"])
    except MpitrainError as error:
        return error.message
    finally:
        run.close()


def main() -> int:
    folder = Path(sys.argv[1])
    examined.once(built_in=True)
    for case in sys.argv[2:]:
        name, *keys = case.split(";")
        settings = [f"optimizer.name={name}", *(key if "." in key.partition("=")[0] else f"optimizer.{key}" for key in keys)]
        found, plain = {}, "train.reproducible=run" in settings
        for n in (2,) if plain else (1, 2, 3):
            part = world.Split(int(world.rank < n), world.rank)
            if world.rank < n:
                for mode, more in (IN_RUN if plain else MODES).items() if n > 1 else (("whole", ()),):
                    out = f"{folder}/{name}-{n}-{mode}"
                    found[f"{n} {mode}"] = hash_of(out, part, *settings, *more, "train.steps=4")
                    if n == 2 and mode != "whole":
                        again = f"{out}-again"
                        hash_of(again, part, *settings, *more, "train.steps=2")
                        found[f"{n} {mode} resumed"] = hash_of(again, part, *settings, *more, "train.steps=4", resume="auto")
            part.Free()
            everyone = world.Ibarrier()
            while not everyone.Test():                # in a barrier these ranks would take cores from those that train
                time.sleep(0.005)
        if world.rank == 0:
            print(case, *(f"{key}={value}" for key, value in found.items()), sep="\t", flush=True)
    return 0


process.run(main)
