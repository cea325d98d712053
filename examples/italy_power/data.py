"""Electric power of days in Italy, 24 hours each, October to March or April to September: ItalyPowerDemand from PyPI's aeon."""

import mpitrain
from mpitrain.data import foreign, importers, packages, write_parts

CLASSES = {"1": "winter", "2": "summer"}
SERIES = {"TRAIN": 67, "TEST": 1029}


def read(part):
    """(series, labels) of a part."""
    file = packages.python_file("aeon", "1.6.0", f"aeon/datasets/data/ItalyPowerDemand/ItalyPowerDemand_{part}.ts")
    x, y, _ = importers.read_ts(file, CLASSES)
    foreign.expect(file, "series", len(x), SERIES[part])
    return x, y


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    write_parts(out.folder, {"train": read("TRAIN"), "test": read("TEST")}, kind="classification", classes=list(CLASSES.values()),
                overwrite=out.overwrite)
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
