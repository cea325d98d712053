"""Handwritten digits from the IDX files of MNIST that you give: t10k-images-idx3-ubyte.gz, with its labels beside it."""

import mpitrain
from mpitrain.data import importers, packages, write_shards

CLASSES = [str(i) for i in range(10)]


def main() -> int:
    out = packages.output_of(__file__, __doc__, takes="the images' IDX file, with the labels' beside it")
    x, y = importers.read_idx_pair(*importers.find_idx_pair(out.given))
    write_shards(out.folder, x, y, kind="classification", classes=CLASSES, overwrite=out.overwrite)
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
