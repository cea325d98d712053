"""Fashion-MNIST, 60,000 and 10,000 images of clothes, from the files of Debian's package dataset-fashion-mnist."""

import mpitrain
from mpitrain.data import foreign, importers, packages, write_parts
from mpitrain.errors import DataError

PACKAGE, FILES = "dataset-fashion-mnist", "usr/share/datasets/fashion-mnist/"
CLASSES = [str(i) for i in range(10)]
IMAGES = {"train": 60_000, "t10k": 10_000}


def read(part):
    """(images (N, 1, 28, 28), labels) of a part."""
    images = packages.debian_file(PACKAGE, f"{FILES}{part}-images-idx3-ubyte.gz")
    labels = packages.debian_file(PACKAGE, f"{FILES}{part}-labels-idx1-ubyte.gz")
    try:
        x, y = importers.read_idx_pair(images.path, labels.path)
    except DataError as error:
        raise DataError(f"{error.message}; {images.cure}", file=error.file) from None
    foreign.expect(images, "images", len(x), IMAGES[part])
    foreign.expect(labels, "labels", len(y), IMAGES[part])
    for i, name in enumerate(CLASSES):
        foreign.expect(labels, f"images of class {name}", int((y == i).sum()), IMAGES[part] // len(CLASSES))
    return x, y


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    write_parts(out.folder, {"train": read("train"), "test": read("t10k")}, kind="classification", classes=CLASSES,
                overwrite=out.overwrite)
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
