"""Fashion-MNIST, 60,000 and 10,000 images of clothes, from the files of Debian's package dataset-fashion-mnist."""

import mpitrain
from mpitrain.data import importers, packages
from mpitrain.errors import DataError

PACKAGE, FILES = "dataset-fashion-mnist", "usr/share/datasets/fashion-mnist/"


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    for folder, part in (("train", "train"), ("test", "t10k")):
        images = packages.debian_file(PACKAGE, f"{FILES}{part}-images-idx3-ubyte.gz")
        labels = packages.debian_file(PACKAGE, f"{FILES}{part}-labels-idx1-ubyte.gz")
        try:
            importers.import_idx(images.path, out.folder / folder, labels=labels.path, overwrite=out.overwrite)
        except DataError as error:
            raise DataError(f"{error.message}; {images.cure}", file=error.file) from None
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
