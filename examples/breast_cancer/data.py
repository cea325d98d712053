"""Breast tumours by 30 numbers of their cells' nuclei, 569 of them: Wisconsin's data, from PyPI's package scikit-learn."""

import csv

import numpy as np

import mpitrain
from mpitrain.data import foreign, packages, write_shards

PACKAGE, VERSION = "scikit-learn", "1.9.1"
CLASSES = ("malignant", "benign")                  # as the package numbers them
ROWS, FEATURES = 569, 30


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    table = packages.python_file(PACKAGE, VERSION, "sklearn/datasets/data/breast_cancer.csv")
    lines = list(csv.reader(foreign.read_text(table).splitlines()))
    if not lines or lines[0] != [str(ROWS), str(FEATURES), *CLASSES]:
        raise table.error(f"the first line is not {ROWS},{FEATURES},{','.join(CLASSES)}")
    foreign.expect(table, "rows", len(lines) - 1, ROWS)
    if any(len(line) != FEATURES + 1 for line in lines[1:]):
        raise table.error(f"expected {ROWS} lines of {FEATURES} numbers and a label after the first")
    columns = list(zip(*lines[1:]))
    x = np.stack([foreign.numbers(table, str(i), cells) for i, cells in enumerate(columns[:-1])], axis=1).astype(np.float32)
    y = foreign.labels(table, str(FEATURES), columns[-1], ("0", "1")).astype(np.uint8)
    write_shards(out.folder, x, y, kind="classification", classes=CLASSES, overwrite=out.overwrite)
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
