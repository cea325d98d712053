"""Promoters of E. coli: 106 sequences of 57 bases, half of which start a gene, from Debian's package r-cran-kernlab."""

import numpy as np

import mpitrain
from mpitrain.data import foreign, packages, write_shards

CLASSES = ("-", "+")
BASES = ("a", "c", "g", "t")


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    file = packages.debian_file("r-cran-kernlab", "usr/lib/R/site-library/kernlab/data/promotergene.rda")
    places = [f"V{i}" for i in range(2, 59)]       # 50 bases before the start of transcription, and 7 from it on
    table = foreign.read_frame(file, "promotergene", ["Class", *places])
    bases = np.stack([foreign.labels(file, name, table[name], BASES) for name in places], axis=1)
    x = np.eye(len(BASES), dtype=np.float32)[bases].reshape(len(bases), -1)
    y = foreign.labels(file, "Class", table["Class"], CLASSES).astype(np.uint8)
    foreign.expect(file, "sequences", len(y), 106)
    foreign.expect(file, "promoters", y.sum(), 53)
    write_shards(out.folder, x, y, kind="classification", classes=CLASSES, overwrite=out.overwrite)
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
