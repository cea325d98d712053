"""Trading volume of the New York Stock Exchange, 1962 to 1986: PyPI's package ISLP as windows of five days and the day after."""

import numpy as np

import mpitrain
from mpitrain.data import foreign, packages, write_parts

COLUMNS, TARGET, LAGS = ("DJ_return", "log_volume", "log_volatility"), 1, 5
DAYS, TRAINING = 6_051, 4_281


def windows(table):
    """(days, 5, 3), the oldest day first, and the log volume of the day that follows."""
    x = np.stack([table[i:len(table) - LAGS + i] for i in range(LAGS)], axis=1)
    return x, table[LAGS:, TARGET]


def r2(guess, y):
    return 1 - ((y - guess) ** 2).sum() / ((y - y.mean()) ** 2).sum()


def baselines(x, y, train):
    """R2 on the test days of least squares on all 15 numbers, and of the straw man that says what yesterday said."""
    flat = np.concatenate([np.ones((len(x), 1)), x.reshape(len(x), -1)], axis=1)
    weights = np.linalg.lstsq(flat[train], y[train], rcond=None)[0]
    return r2(flat[~train] @ weights, y[~train]), r2(x[~train, -1, TARGET], y[~train])


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    file = packages.python_file("ISLP", "0.6.0", "ISLP/data/NYSE.csv")
    table = foreign.read_table(file, [*COLUMNS, "train"])
    marks = foreign.labels(file, "train", table["train"], ["FALSE", "TRUE"])
    foreign.expect(file, "days", len(marks), DAYS)
    foreign.expect(file, "days to train on", marks.sum(), TRAINING)
    train = marks[LAGS:].astype(bool)
    x, y = windows(np.stack([foreign.numbers(file, name, table[name]) for name in COLUMNS], axis=1))
    parts = {part: (x[rows].astype("f4"), y[rows, None].astype("f4")) for part, rows in (("train", train), ("test", ~train))}
    write_parts(out.folder, parts, kind="regression", overwrite=out.overwrite)
    print("{} days to train on, {} to judge by; R2 of least squares {:.3f}, of yesterday's volume {:.3f}".format(
        train.sum(), (~train).sum(), *baselines(x, y, train)))
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
