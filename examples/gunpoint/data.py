"""Two movements of a hand: UCR's GunPoint from PyPI's package aeon, series of 150 positions."""

import numpy as np

import mpitrain
from mpitrain.data import foreign, packages, write_shards

NAME, CLASSES = "GunPoint", ["1", "2"]


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    for folder, part in (("train", "TRAIN"), ("test", "TEST")):
        file = packages.python_file("aeon", "1.6.0", f"aeon/datasets/data/{NAME}/{NAME}_{part}.ts")
        series, names = foreign.read_series(file)
        write_shards(out.folder / folder, series[:, :, None].astype(np.float32), foreign.labels(file, "class", names, CLASSES),
                     kind="classification", classes=["gun", "point"], overwrite=out.overwrite)
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
