"""Two movements of a hand: UCR's GunPoint from PyPI's package aeon, series of 150 positions."""

import mpitrain
from mpitrain.data import importers, packages


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    for folder, part in (("train", "TRAIN"), ("test", "TEST")):
        file = packages.python_file("aeon", "1.6.0", f"aeon/datasets/data/GunPoint/GunPoint_{part}.ts")
        importers.import_ts(file, out.folder / folder, classes={"1": "gun", "2": "point"}, overwrite=out.overwrite)
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
