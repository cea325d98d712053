"""Splice junctions of primate DNA (Statlog): 60 bases around a place, as 180 bits, from Debian's package r-cran-mlbench."""

import numpy as np

import mpitrain
from mpitrain.data import foreign, packages, write_parts

# Exon to intron (donor), intron to exon (acceptor), neither; and how many rows are so.
COUNTS = {"ei": 767, "ie": 765, "n": 1_654}
CLASSES = tuple(COUNTS)
TRAINING = 2000                                    # rows in Statlog's training set; the other 1,186 are its test set


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    file = packages.debian_file("r-cran-mlbench", "usr/lib/R/site-library/mlbench/data/DNA.rda")
    bits = [f"V{i}" for i in range(1, 181)]
    table = foreign.read_frame(file, "DNA", [*bits, "Class"])
    x = np.stack([foreign.numbers(file, name, table[name]) for name in bits], axis=1).astype(np.float32)
    y = foreign.labels(file, "Class", table["Class"], CLASSES).astype(np.uint8)
    foreign.expect(file, "rows", len(y), sum(COUNTS.values()))
    for i, (name, count) in enumerate(COUNTS.items()):
        foreign.expect(file, f"rows of class {name}", (y == i).sum(), count)
    write_parts(out.folder, {"train": (x[:TRAINING], y[:TRAINING]), "test": (x[TRAINING:], y[TRAINING:])},
                kind="classification", classes=CLASSES, overwrite=out.overwrite)
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
