"""Who does not pay back: 10,000 credit card holders of PyPI's package ISLP (Default), 333 of whom default."""

import numpy as np

import mpitrain
from mpitrain.data import foreign, packages, write_parts

COLUMNS = ("student", "balance", "income")
ROWS, DEFAULTS = 10_000, 333


def fold_of(n, folds=5):
    """A number of 0 ... folds - 1 for each row, from its place alone."""
    return np.random.default_rng(0).permutation(n) % folds


def logistic(x, y, steps=30):
    """Weights of logistic regression by Newton's method (iteratively reweighted least squares); the intercept is first."""
    x = np.concatenate([np.ones((len(x), 1)), x], axis=1)
    weights = np.zeros(x.shape[1])
    for _ in range(steps):
        p = 1 / (1 + np.exp(-x @ weights))
        weights += np.linalg.solve(x.T @ (x * (p * (1 - p))[:, None]), x.T @ (y - p))
    return weights


def auc(scores, y):
    """The probability that one who defaults has a higher score than one who does not; equal scores count half."""
    _, ranks, counts = np.unique(scores, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2
    positive = y == 1
    n = positive.sum()
    return (middle[ranks][positive].sum() - n * (n + 1) / 2) / (n * (~positive).sum())


def f1(guess, y):
    right = (guess & (y == 1)).sum()
    return 2 * right / (guess.sum() + (y == 1).sum())


def baseline(x, y, test):
    """AUC and F1 of logistic regression on the test rows, F1 at one half and where defaults weigh as much as the others."""
    mean, deviation = x[~test].mean(axis=0), x[~test].std(axis=0)
    x = (x - mean) / deviation
    weights = logistic(x[~test], y[~test])
    scores = weights[0] + x[test] @ weights[1:]
    return auc(scores, y[test]), f1(scores > 0, y[test])


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    file = packages.python_file("ISLP", "0.6.0", "ISLP/data/Default.csv")
    table = foreign.read_table(file, ["default", *COLUMNS])
    y = foreign.labels(file, "default", table["default"], ["No", "Yes"])
    foreign.expect(file, "rows", len(y), ROWS)
    foreign.expect(file, "defaults", y.sum(), DEFAULTS)
    student = foreign.labels(file, "student", table["student"], ["No", "Yes"])
    x = np.stack([student, *(foreign.numbers(file, name, table[name]) for name in COLUMNS[1:])], axis=1)
    test = fold_of(len(y)) == 0
    parts = {part: (x[rows].astype("f4"), y[rows]) for part, rows in (("train", ~test), ("test", test))}
    write_parts(out.folder, parts, kind="classification", classes=["pays", "defaults"], overwrite=out.overwrite)
    print("{} rows to train on, {} to judge by, {} of which default; logistic regression: AUC {:.4f}, F1 {:.4f}".format(
        (~test).sum(), test.sum(), y[test].sum(), *baseline(x, y, test)))
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
