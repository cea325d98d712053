"""Khan's small round blue cell tumours: 2,308 genes of 63 and 20 samples, four kinds, from PyPI's package ISLP."""

import numpy as np

import mpitrain
from mpitrain.data import foreign, packages, write_parts

PACKAGE, VERSION = "ISLP", "0.6.0"
CLASSES = ("1", "2", "3", "4")                     # as the package numbers them; it does not say which tumour is which
ROWS = {"train": 63, "test": 20}


def read(part):
    """(genes (N, 2308), kinds) of a part."""
    genes = packages.python_file(PACKAGE, VERSION, f"ISLP/data/Khan_x{part}.csv")
    kinds = packages.python_file(PACKAGE, VERSION, f"ISLP/data/Khan_y{part}.csv")
    table = foreign.read_table(genes, [f"V{i}" for i in range(1, 2309)])
    x = np.stack([foreign.numbers(genes, name, cells) for name, cells in table.items()], axis=1).astype(np.float32)
    y = foreign.labels(kinds, "x", foreign.read_table(kinds, ["x"])["x"], CLASSES).astype(np.uint8)
    foreign.expect(genes, "rows", len(x), ROWS[part])
    foreign.expect(kinds, "rows", len(y), ROWS[part])
    return x, y


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    write_parts(out.folder, {part: read(part) for part in ("train", "test")}, kind="classification", classes=CLASSES,
                overwrite=out.overwrite)
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
