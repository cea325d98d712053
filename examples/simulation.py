"""Writes an HDF5 file such as a simulation leaves behind: groups, attributes, several datasets, compressed chunks.

    python examples/simulation.py examples/simulation.h5
    mpirun -n 2 python -m mpitrain train examples/simulation.toml

The engine trains on two datasets of it where they lie; nothing is converted. The task: from the temperature at 16 sensors
along a rod, one second after it was heated, find where the heat was put in, how much of it, and how wide.
"""

import sys

import h5py
import numpy as np


def main(path: str, n: int = 20_000) -> None:
    rng = np.random.default_rng(1)
    place, amount, width = rng.uniform(0.2, 0.8, n), rng.uniform(0.5, 2.0, n), rng.uniform(0.02, 0.1, n)
    sensors = np.linspace(0.0, 1.0, 16)
    spread = np.sqrt(width**2 + 2 * 0.005)                              # heat kernel: the width grows with time
    temperature = amount[:, None] * (width / spread)[:, None] * np.exp(-(sensors - place[:, None])**2 / (2 * spread[:, None]**2))
    temperature += rng.normal(0, 0.005, temperature.shape)              # the sensors' noise
    with h5py.File(path, "w") as file:
        file.attrs["code"] = "rod-1d"
        run = file.create_group("run0042")
        run.create_dataset("fields/temperature", data=temperature, chunks=(1000, 16), compression="gzip", shuffle=True)
        run.create_dataset("source", data=np.stack([place, amount, width * 10], axis=1))
        run.create_dataset("sensors", data=sensors)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "examples/simulation.h5")
