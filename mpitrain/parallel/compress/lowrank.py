"""PowerSGD: a matrix of gradients as the product of two thin ones (Vogels, Karimireddy, Jaggi 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend.random import stream_key
from mpitrain.errors import ConfigError
from mpitrain.kernels import lowrank as kernels
from mpitrain.kernels.random import normal
from mpitrain.parallel.compress.compressor import Host, Kept, Linear, Piece, State

IN_SPAN = 1e-5             # a column of which orthogonalising leaves less is in the span of those before, but for rounding


class Matrix(NamedTuple):
    """A parameter that travels as a product: where it lies in the array, (rows, columns), and P and Q in the messages."""

    piece: Piece
    rows: int
    columns: int
    p: slice
    q: slice


class PowerSGD(Linear):
    """``powersgd:2``: M (rows, columns) of rank 2 at most. One step of subspace iteration from the last step's Q:

        phase 0: P = sum of M_w Q over workers, then its columns made orthonormal       phase 1: Q = sum of M_w' P
        arrives: P Q';   worker w keeps M_w - P (M_w' P)'

    A parameter's first dim has the rows, all others the columns. Parameters of one dim, and those that a product would make no
    smaller, travel as they are in phase 0. All workers compute P and Q' alike, in an order that depends on no processor. A column
    of Q that is zero, for it would stay so, is drawn again.
    """

    phases = 2
    block = None

    def __init__(self, pieces: Sequence[Piece], n: int, *, seed: int = 0, feedback: bool = True, rank: int = 4):
        super().__init__(pieces, n, seed=seed, feedback=feedback)
        self.rank, self.dense, self.matrices = rank, list[Piece](), list[Matrix]()
        sides = {piece: (piece.shape[0], prod(piece.shape[1:])) for piece in self.pieces if len(piece.shape) > 1}
        thin = {piece: side for piece, side in sides.items() if rank * sum(side) < prod(side)}
        self.dense = [piece for piece in self.pieces if piece not in thin]
        self._dense_words = p = sum(piece.stop - piece.start for piece in self.dense)
        q = 0
        for piece, (rows, columns) in thin.items():
            self.matrices.append(Matrix(piece, rows, columns, slice(p, p + rank * rows), slice(q, q + rank * columns)))
            p, q = p + rank * rows, q + rank * columns
        self._words = p, q
        self._arrived = np.zeros(p, np.float32)   # of phase 0; its P are orthonormal
        beyond = [piece.name for piece in sides if piece not in thin and piece.stop > piece.start]
        if beyond:
            self.notes.append(f"powersgd:{rank} sends as they are, for two matrices of rank {rank} would be no smaller: "
                              + ", ".join(beyond))

    @classmethod
    def options(cls, argument: str | None) -> dict[str, Any]:
        if argument is None or not argument.isdecimal() or int(argument) < 1:
            raise ConfigError(f"expected a rank, a whole number above 0, as in powersgd:2, found {argument or 'nothing'}")
        return {"rank": int(argument)}

    def states(self) -> dict[str, Kept]:
        return {**super().states(), **{f"q/{matrix.piece.name}": Kept((self.rank, matrix.columns), "all")
                                       for matrix in self.matrices}}

    def begin(self, state: State) -> None:
        super().begin(state)
        for matrix in self.matrices:
            for column in range(self.rank):
                state[f"q/{matrix.piece.name}"][column] = self._drawn(matrix, column, "start")

    def _drawn(self, matrix: Matrix, column: int, step: int | str) -> Any:
        return normal(stream_key(self.seed, "powersgd", matrix.piece.name, column, step), 0, matrix.columns, np)

    def words(self, phase: int) -> int:
        return self._words[phase]

    def encode(self, phase: int, step: int, values: Host, state: State, message: Host) -> None:
        error = state.get("error")
        if phase == 0:
            self._encode_dense(values, error, message)
        for matrix in self.matrices:
            m, e = self._of(matrix, values), None if error is None else self._of(matrix, error)
            if phase == 0:
                kernels.left(m, e, state[f"q/{matrix.piece.name}"], message[matrix.p].reshape(self.rank, -1))
                continue
            p, q = self._arrived[matrix.p].reshape(self.rank, -1), message[matrix.q].reshape(self.rank, -1)
            kernels.right(m, e, p, q)
            if e is not None and np.isfinite(q).all():
                kernels.leave(m, e, p, q)

    def _encode_dense(self, values: Host, error: Host | None, message: Host) -> None:
        at = 0
        for piece in self.dense:
            own, to = slice(piece.start, piece.stop), message[at:at + piece.stop - piece.start]
            to[...] = values[own]
            if error is not None:                 # zeros, unless a run began with other compression
                to += error[own]
                if np.isfinite(to).all():
                    error[own] = 0
            at += len(to)

    def _of(self, matrix: Matrix, array: Host) -> Host:
        return array[matrix.piece.start:matrix.piece.stop].reshape(matrix.rows, matrix.columns)

    def decode(self, phase: int, step: int, arrived: Host, state: State, values: Host) -> None:
        if phase == 0:
            self._arrived[...] = arrived
            for matrix in self.matrices:
                orthonormal(self._arrived[matrix.p].reshape(self.rank, -1))
            if not self.matrices:
                self._decode_dense(values)
            return
        self._decode_dense(values)
        for matrix in self.matrices:
            q = arrived[matrix.q].reshape(self.rank, -1)
            kernels.product(self._arrived[matrix.p].reshape(self.rank, -1), q, self._of(matrix, values))
            if np.isfinite(q).all():
                kept = state[f"q/{matrix.piece.name}"]
                kept[...] = q
                for column in np.flatnonzero(~q.any(axis=1)):
                    kept[column] = self._drawn(matrix, int(column), step)

    def _decode_dense(self, values: Host) -> None:
        at = 0
        for piece in self.dense:
            size = piece.stop - piece.start
            values[piece.start:piece.stop] = self._arrived[at:at + size]
            at += size


def orthonormal(p: Host) -> None:
    """Makes the rows of p (rank, n) orthonormal, in place: Gram-Schmidt in float64, twice, which is enough (Giraud et al. 2005).
    A row in the span of those before becomes zeros; where a number is not finite, all become NaN."""
    if not np.isfinite(p).all():
        p[...] = np.nan
        return
    made: list[Any] = []
    for row in p:
        x = row.astype(np.float64)
        size = np.sqrt(np.sum(x * x))
        for _ in range(2):
            for other in made:
                x -= np.sum(other * x) * other
        left = np.sqrt(np.sum(x * x))
        if left <= IN_SPAN * size:
            row[...] = 0
            continue
        made.append(x / left)
        row[...] = made[-1]
