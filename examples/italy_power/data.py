"""Electric power of days in Italy, 24 hours each, October to March or April to September: ItalyPowerDemand from PyPI's aeon."""

import mpitrain
from mpitrain.data import importers, packages


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    for folder, part in (("train", "TRAIN"), ("test", "TEST")):
        file = packages.python_file("aeon", "1.6.0", f"aeon/datasets/data/ItalyPowerDemand/ItalyPowerDemand_{part}.ts")
        importers.import_ts(file, out.folder / folder, classes={"1": "winter", "2": "summer"}, overwrite=out.overwrite)
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
