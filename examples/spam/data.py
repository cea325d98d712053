"""Spam or mail: 4,601 e-mails of Hewlett-Packard as 57 frequencies, of Debian's package r-cran-kernlab."""

import numpy as np

import mpitrain
from mpitrain.data import foreign, packages, write_parts

PATH = "usr/lib/R/site-library/kernlab/data/spam.rda"
MAILS, SPAM = 4_601, 1_813


def held_out(x):
    """Whether each row judges, a random third of the mails that differ: one that was sent twice is never on both sides."""
    _, mail = np.unique(x, axis=0, return_inverse=True)
    mail = mail.reshape(-1)
    return (np.random.default_rng(0).permutation(mail.max() + 1) % 3 == 0)[mail]


def least_squares(x, y, test):
    """The share of test rows that a linear discriminant by least squares gets right."""
    x = np.concatenate([np.ones((len(x), 1)), x], axis=1)
    weights = np.linalg.lstsq(x[~test], 2.0 * y[~test] - 1, rcond=None)[0]
    return ((x[test] @ weights > 0) == y[test]).mean()


def main() -> int:
    out = packages.output_of(__file__, __doc__)
    file = packages.debian_file("r-cran-kernlab", PATH)
    table = foreign.read_frame(file, "spam")
    y = foreign.labels(file, "type", foreign.pick(file, table, ["type"])["type"], ["nonspam", "spam"])
    foreign.expect(file, "e-mails", len(y), MAILS)
    foreign.expect(file, "of them spam", y.sum(), SPAM)
    columns = [name for name in table if name != "type"]
    x = np.log1p(100 * np.stack([foreign.numbers(file, name, table[name]) for name in columns], axis=1))
    test = held_out(x)
    parts = {part: (x[rows].astype("f4"), y[rows]) for part, rows in (("train", ~test), ("test", test))}
    write_parts(out.folder, parts, kind="classification", classes=["mail", "spam"], overwrite=out.overwrite)
    print(f"{len(columns)} columns, {(~test).sum()} e-mails to train on, {test.sum()} to judge by; "
          f"least squares {least_squares(x, y, test):.4f}")
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
