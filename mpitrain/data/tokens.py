"""Language-model samples: windows over one long row of tokens."""

from __future__ import annotations

from copy import copy

import numpy as np

from mpitrain.data.shards import Dataset, Rows, Values
from mpitrain.data.split import fold_of, share_of
from mpitrain.errors import ConfigError, DataError

IGNORE = -1        # A padded place has this target; losses skip it.


class TokenWindows:
    """Samples of `block` tokens and the tokens that follow each, from tokens `start`..`stop` of a dataset.

    Sample i starts at token start + i*stride: ``x = tokens[s:s+block]``, ``y = tokens[s+1:s+block+1]``, both int64.
    Training takes whole windows only. With `cover`, windows are consecutive (stride = block), and the last one may be
    short: x is padded with 0 and y with -1 there. Then every token but the first is predicted exactly once.
    """

    kind = "tokens"

    def __init__(self, tokens: Dataset, block: int, *, stride: int = 1, start: int = 0, stop: int | None = None,
                 cover: bool = False):
        stop = len(tokens) if stop is None else stop
        if tokens.kind != "tokens":
            raise DataError(f"expected a 1-D dataset of tokens, found data for {tokens.kind}", file=tokens.path,
                            dataset=tokens.x.name)
        if block < 1 or stride < 1:
            raise ConfigError(f"windows need model.block >= 1 and data.stride >= 1, not {block} and {stride}")
        needed = 2 if cover else block + 1
        if stop - start < needed:
            raise DataError(f"{stop - start} tokens for {'validation' if cover else 'training'}, but one window takes {needed}; "
                            f"lower model.block or change data.validation", file=tokens.path, dataset=tokens.x.name)
        self.tokens, self.block, self.start, self.stop, self.cover = tokens, block, start, stop, cover
        self.dtype = np.dtype(np.int64)
        self.stride = block if cover else stride
        self.n = -(-(stop - start - 1) // block) if cover else (stop - start - block - 1) // stride + 1
        self.path, self.vocabulary, self.names = tokens.path, tokens.vocabulary, tokens.names

    def __len__(self) -> int:
        return self.n

    def read(self, rows: Rows) -> tuple[Values, Values]:
        places = (self.start + rows * self.stride)[:, None] + np.arange(self.block + 1)
        beyond = places >= self.stop
        if beyond.any():
            places[beyond] = self.stop - 1
        flat = self.tokens.read_field(self.tokens.x, places.reshape(-1))
        window = flat.reshape(places.shape).astype(self.dtype)
        if beyond.any():
            x, y = window[:, :-1].copy(), window[:, 1:].copy()
            x[beyond[:, 1:]], y[beyond[:, 1:]] = 0, IGNORE           # A place without a target is not an input either.
            return x, y
        return window[:, :-1], window[:, 1:]

    def as_stored(self) -> TokenWindows:
        """The same windows in the dtype of the file, a fraction of the bytes; those that may be padded stay int64."""
        made = copy(self)
        made.dtype = self.dtype if self.cover else self.tokens.x.dtype
        return made

    def where(self, row: int) -> tuple[str, int]:
        """(file, token inside that file) where a sample starts, for messages."""
        return self.tokens.where(self.start + row * self.stride)


def token_split(tokens: Dataset, block: int, validation: float | str, *,
                stride: int = 1) -> tuple[TokenWindows, TokenWindows | None]:
    """(training, validation) windows; the validation part is the tail, and every token of it but the first is predicted.

    Only "tail:SHARE" (or 0) is possible: windows overlap, so a random share would train on what it validates.
    """
    found = None if fold_of(validation) else share_of(validation)
    if found is None or found[0] and not found[1]:
        raise ConfigError(f'data.validation={validation}: windows of tokens overlap, so random rows would be seen in '
                          f'training; use "tail:0.1" or the path of another file')
    n_train = int(len(tokens) * (1 - found[0]))
    training = TokenWindows(tokens, block, stride=stride, stop=n_train)
    return training, TokenWindows(tokens, block, start=n_train, cover=True) if found[0] else None
