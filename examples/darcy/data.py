"""Darcy flow on 16 x 16 points, 1,000 and 50 samples, from the files of PyPI's package neuraloperator.

Inputs are 1 where the ground lets through the more, and 0 elsewhere; targets are the pressure. The equation does not know which
coordinate is the first, so each sample to train on gives another one by exchanging the two.
"""

import numpy as np

import mpitrain
from mpitrain.data import packages, write_parts
from mpitrain.errors import DataError
from mpitrain.interchange import torch_files

PACKAGE, VERSION, FOLDER = "neuraloperator", "0.3.0", "neuralop/datasets/data/"
SAMPLES = {"train": 1000, "test": 50}


def fields(part):
    """(Where the ground lets through, the pressure), each (N, 1, 16, 16) float32."""
    found = packages.python_file(PACKAGE, VERSION, f"{FOLDER}darcy_{part}_16.pt")
    try:
        tensors = torch_files.read(found.path).tensors             # read without PyTorch
    except DataError as error:
        raise found.error(error.message) from None
    shape = (SAMPLES[part], 16, 16)
    for name in ("x", "y"):
        if name not in tensors or tensors[name].shape != shape:
            there = str(tensors[name].shape) if name in tensors else f"{', '.join(tensors) or 'nothing'}"
            raise found.error(f"expected a tensor {name} of shape {shape}, found {there}", dataset=name)
    x, y = (np.array(tensors[name].values(), np.float32)[:, None] for name in ("x", "y"))
    return x, y


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    x, y = (np.concatenate([field, field.swapaxes(2, 3)]) for field in fields("train"))
    write_parts(out.folder, {"train": (x, y), "test": fields("test")}, kind="regression", overwrite=out.overwrite)
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
