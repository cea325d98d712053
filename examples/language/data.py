"""A text as characters, for both models of this example, and what counting alone says about it.

    python examples/language/data.py tinyshakespeare.txt

writes `data` beside this file (the same as `mpitrain data import text`), and prints the baselines: how well characters of the
last tenth are found by the frequencies of the first nine tenths, alone or beside their neighbours.
"""

import os

import numpy as np

import mpitrain
from mpitrain.data import packages, write_shards
from mpitrain.data.keyed import sample_keys
from mpitrain.data.tasks import TASKS
from mpitrain.errors import DataError, MissingError

HELD_OUT = 0.1                                     # of the text, its end; the run files have data.validation = "tail:0.1"
BLOCK = 16                                         # model.block of masked.toml
NEIGHBOURS = 3.0                                   # counts that the frequency without a neighbour is worth


def characters(path):
    """(numbers of the characters, the characters in order) of a text in UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingError("there is no such text; give the path of one, as tinyshakespeare.txt", file=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the text cannot be read: {error}", file=str(path)) from None
    known = sorted(set(text))
    if len(text) < 1000 or len(known) > 250:
        raise DataError(f"{len(text)} characters, {len(known)} different ones; the example is for 1,000 or more of at most 250",
                        file=str(path))
    number = {character: i for i, character in enumerate(known)}
    return np.array([number[character] for character in text], np.uint8), known


def found(probabilities, truth):
    """(accuracy, perplexity) of probabilities (n, V) for the characters that are there."""
    right = probabilities.argmax(axis=1) == truth
    return float(right.mean()), float(np.exp(-np.log(probabilities[np.arange(len(truth)), truth]).mean()))


def beside(counts, without):
    """Probabilities (..., V) of counts, where `without`, those that know one neighbour less, count as some observations."""
    return (counts + NEIGHBOURS * without) / (counts.sum(axis=-1, keepdims=True) + NEIGHBOURS)


class Counts:
    """How often characters stand alone, behind one, before one, and between two, in the first nine tenths of a text."""

    def __init__(self, train, vocabulary):
        shape = (vocabulary,) * 3
        triples = np.bincount(np.ravel_multi_index((train[:-2], train[2:], train[1:-1]), shape), minlength=vocabulary**3)
        pairs = np.bincount(train[:-1] * vocabulary + train[1:], minlength=vocabulary**2).reshape(shape[1:])
        self.alone = (np.bincount(train, minlength=vocabulary) + 1) / (len(train) + vocabulary)
        self.after, self.before = beside(pairs, self.alone), beside(pairs.T, self.alone)
        self.between = beside(triples.reshape(shape), (self.after[:, None] + self.before[None]) / 2)

    def next(self, test):
        """Name -> (accuracy, perplexity) for each character of a text after the first, from what came before."""
        return {"frequencies alone": found(np.broadcast_to(self.alone, (len(test) - 1, len(self.alone))), test[1:]),
                "the character before": found(self.after[test[:-1]], test[1:])}

    def masked(self, test, block):
        """The same for hidden characters of windows as masked.toml makes them, from the neighbours as the model sees them."""
        hidden, rows = len(self.alone), len(test) // block
        x, y = test[:rows * block].reshape(rows, block), np.zeros((rows, block), np.int64)
        seen, target = TASKS["mask"](x, y, sample_keys(0, np.arange(rows)), token=hidden)
        edged = np.pad(seen, ((0, 0), (1, 1)), constant_values=hidden)
        left, right, wanted = (part[target >= 0] for part in (edged[:, :-2], edged[:, 2:], target))
        guess = np.broadcast_to(self.alone, (len(wanted), hidden)).copy()
        for known, table in (((left < hidden) & (right == hidden), lambda at: self.after[left[at]]),
                             ((left == hidden) & (right < hidden), lambda at: self.before[right[at]]),
                             ((left < hidden) & (right < hidden), lambda at: self.between[left[at], right[at]])):
            guess[known] = table(known)
        return {"frequencies alone": found(np.broadcast_to(self.alone, guess.shape), wanted),
                "both neighbours": found(guess, wanted)}


def main():
    out = packages.output_of(__file__, __doc__.partition("\n")[0], takes="a text in UTF-8")
    tokens, known = characters(out.given)
    write_shards(out.folder, tokens, kind="tokens", vocabulary=known, overwrite=out.overwrite)
    print(f"{len(tokens):,} characters, {len(known)} different ones, in {os.path.relpath(out.folder)}")
    n = int(len(tokens) * (1 - HELD_OUT))
    counts, test = Counts(tokens[:n].astype(np.int64), len(known)), tokens[n:].astype(np.int64)
    for what, baselines in (("next", counts.next(test)), ("masked", counts.masked(test, BLOCK))):
        for name, (accuracy, perplexity) in baselines.items():
            print(f"{what:<8}{name:<22} accuracy {accuracy:.4f}  perplexity {perplexity:.3f}")
    return 0


if __name__ == "__main__":
    mpitrain.Process().run(main)
