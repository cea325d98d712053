"""Proves a compressor before the first message: all ranks in one process, at real sizes, on values that are made up.

What is proved: messages are as long as they say and written whole; nothing else is written to; all ranks decode the same bits;
what is sent and what is kept add up to what there was; zeros send zeros; NaN and infinity arrive; bits depend on no bucket, and
on nothing that is kept outside of `state`. Every rank finds the same by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpitrain.backend.random import stream_key
from mpitrain.errors import MpitrainError, name_and_text, own_place, place
from mpitrain.kernels.random import normal
from mpitrain.parallel.compress.compressor import WORD, CompressError, Host, Make, Piece
from mpitrain.parallel.compress.simulate import Workers

GUARD = 64                                        # bytes on both sides of an array, which must stay as they are
STEPS = 3
SPECIAL = (np.nan, np.inf, -np.inf)


def check_compressor(make: Make, n: int, pieces: Sequence[Piece], *, seed: int = 0, feedback: bool = True) -> None:
    """CompressError, in one line, unless the compressor is right for arrays of `pieces` between n workers. Takes the memory of
    some 6 n such arrays."""
    try:
        trial = _Trial(make, n, tuple(pieces), seed, feedback)
        for proof in (_lengths, _written, _messages, _feedback, _zeros, _memory, _cuts, _not_finite):
            proof(trial)
            trial.guarded.clear()
    except CompressError as error:
        raise CompressError(f'compressor "{make.text}" with n={n}: {error.message}') from None
    except MpitrainError as error:
        raise CompressError(f'compressor "{make.text}" with n={n}: {error.message}') from error
    except Exception as error:
        where = own_place(error, "_source") or place(error)
        raise CompressError(f'compressor "{make.text}" with n={n} raised {name_and_text(error, where)}') from error


class _Trial:
    """What the proofs share: how workers are made, and memory that shows who wrote where."""

    def __init__(self, make: Make, n: int, pieces: tuple[Piece, ...], seed: int, feedback: bool):
        self.make, self.n, self.pieces, self.seed, self.feedback = make, n, pieces, seed, feedback
        self.length = pieces[-1].stop if pieces else 0
        self.guarded: list[tuple[Any, Any]] = []  # memory with its guards, and what it must stay

    def workers(self, fill: int = 0, pieces: Sequence[Piece] | None = None, n: int | None = None) -> Workers:
        return Workers(self.make, self.pieces if pieces is None else pieces, n or self.n, seed=self.seed, feedback=self.feedback,
                       memory=partial(self.memory, fill))

    def gradients(self, step: int, n: int | None = None) -> list[Host]:
        return [self.kept(normal(stream_key("check", step, worker), 0, self.length, np).astype(np.float32))
                for worker in range(n or self.n)]

    def memory(self, fill: int, count: int, dtype: Any) -> Any:
        """An array for a message, of bytes `fill`, with guards around it."""
        nbytes = count * np.dtype(dtype).itemsize
        outer = np.full(nbytes + 2 * GUARD, fill, np.uint8)
        self.guarded += [(part, part.copy()) for part in (outer[:GUARD], outer[GUARD + nbytes:])]
        return outer[GUARD:GUARD + nbytes].view(dtype)

    def kept(self, values: Host) -> Host:
        """The same values, which no one may change."""
        inner: Host = self.memory(0, len(values), np.float32)
        inner[...] = values
        self.guarded.append((inner, values.copy()))
        return inner

    def untouched(self) -> None:
        for found, was in self.guarded:
            if found.tobytes() != was.tobytes():
                raise CompressError("encode writes beyond its message" if found.dtype == np.uint8 else
                                    "encode changes the gradient that it is given; it may write to the message and the state")
        self.guarded.clear()


def _lengths(trial: _Trial) -> None:
    """Messages have lengths, equal on all ranks, that keep parts aligned."""
    compressor: Any = trial.make(trial.pieces, trial.n, seed=trial.seed, feedback=trial.feedback)
    calls: list[tuple[str, Callable[[], Any], int]] = []
    if compressor.kind == "packed":
        if compressor.block is None or compressor.block < 1:
            raise CompressError(f"a packed compressor has blocks; block = {compressor.block}, expected a number of elements")
        calls = [("nbytes", partial(compressor.nbytes, 0, stop), WORD) for stop in {0, 1, compressor.blocks}
                 if stop <= compressor.blocks]
    elif compressor.kind == "gathered":
        calls = [("nbytes", compressor.nbytes, WORD)]
    else:
        if type(compressor.phases) is not int or compressor.phases < 1:
            raise CompressError(f"phases = {compressor.phases!r:.40}, expected a whole number above 0")
        calls = [("words", partial(compressor.words, phase), 1) for phase in range(compressor.phases)]
    for name, call, unit in calls:
        found = call()
        if not isinstance(found, int | np.integer) or found < 0 or found % unit:
            raise CompressError(f"{name} gives {found!r:.40}, expected a whole number"
                                + (f", a multiple of {unit}" if unit > 1 else ""))
    for name, kept in compressor.states().items():
        if kept.of not in ("worker", "owner", "all") or (kept.of == "owner" and kept.shape != (trial.length,)):
            raise CompressError(f'state "{name}" is {kept}; expected of "worker", "all", or "owner" with the array\'s own shape')


def _written(trial: _Trial) -> None:
    """The first message of a worker, in memory that held other bytes before."""
    found, gradient = [], trial.gradients(0, 1)[0]
    for fill in (0x00, 0xFF):
        compressor: Any = trial.make(trial.pieces, trial.n, seed=trial.seed, feedback=trial.feedback)
        state = compressor.new_state()
        if compressor.kind == "packed":
            message = trial.memory(fill, compressor.nbytes(0, compressor.blocks), np.uint8)
            compressor.encode(0, 0, gradient, state.get("error"), 0, compressor.blocks, message)
        elif compressor.kind == "gathered":
            message = trial.memory(fill, compressor.nbytes(), np.uint8)
            compressor.encode(0, gradient, state, message)
        else:
            message = trial.memory(fill, compressor.words(0), np.float32)
            compressor.encode(0, 0, gradient, state, message)
        found.append(message.tobytes())
    trial.untouched()
    if found[0] != found[1]:
        raise CompressError("encode does not write all of its message, or is not the same twice: two runs sent other bytes")


def _messages(trial: _Trial) -> None:
    """Two runs whose messages lie in memory that held other bytes: equal messages, equal sums on all ranks, all of it written."""
    runs = []
    for fill in (0x00, 0xFF):
        workers, sums, sent = trial.workers(fill), [], []
        for step in range(STEPS):
            results = workers.exchange(step, trial.gradients(step))
            trial.untouched()
            for worker, result in enumerate(results):
                if result.tobytes() != results[0].tobytes():
                    raise CompressError(f"decode gives rank {worker} other bits than rank 0 in step {step}")
            if workers.parted:
                raise CompressError(f'decode leaves state "{workers.parted}", which is of all, with other bits on another rank')
            sums.append(results[0].tobytes())
            sent.append(list(workers.messages))
        runs.append((sent, sums))
    if runs[0][0] != runs[1][0]:
        raise CompressError("encode does not write all of its message, or is not the same twice: two runs sent other bytes")
    if runs[0][1] != runs[1][1]:
        raise CompressError("decode does not write all of the array, or is not the same twice: two runs got other sums")


def _feedback(trial: _Trial) -> None:
    """What one worker sends, and its residual, add up to its gradient and its last residual."""
    workers = trial.workers(n=1)
    compressor, state = workers.compressors[0], workers.states[0]
    for step in range(STEPS):
        if "error" not in state:
            return
        gradient, before = trial.gradients(step, 1)[0], state["error"].copy()
        sent = np.zeros_like(gradient)
        if compressor.kind == "packed":
            message = trial.memory(0, compressor.nbytes(0, compressor.blocks), np.uint8)
            compressor.encode(step, 0, gradient, state["error"], 0, compressor.blocks, message)
            compressor.decode(message, 0, compressor.blocks, sent, False)
        else:
            sent = workers.exchange(step, [gradient])[0]
        there = gradient + before
        off = np.abs(sent.astype(np.float64) + state["error"] - there)
        allowed = 0.0 if compressor.exact else np.spacing(np.maximum(np.abs(there), np.abs(sent)))
        wrong = np.flatnonzero(~(off <= allowed))
        if len(wrong):
            i = int(wrong[0])
            raise CompressError(f"what is sent and the residual do not add up in step {step}: element {i} of {_name(trial, i)} "
                                f"was {there[i]:.9g}, sent {sent[i]:.9g}, kept {state['error'][i]:.9g}"
                                + ("; exact = True promises every bit" if compressor.exact else ""))


def _zeros(trial: _Trial) -> None:
    workers = trial.workers()
    result = workers.exchange(0, [np.zeros(trial.length, np.float32) for _ in range(trial.n)])[0]
    left = max((float(np.abs(state["error"]).max(initial=0)) for state in workers.states if "error" in state), default=0.0)
    if result.any() or left or np.isnan(result).any():
        raise CompressError(f"a gradient of zeros arrives with {np.count_nonzero(result)} elements that are none, and leaves "
                            f"residuals up to {left:.3g}")


def _memory(trial: _Trial) -> None:
    """A new compressor with the state of another goes on as that one would: nothing is kept elsewhere."""
    first, second = trial.workers(), trial.workers()
    for step in range(STEPS):
        first.exchange(step, trial.gradients(step))
    for old, new in zip(first.states, second.states):
        for name in new:
            new[name][...] = old[name]
    results = [workers.exchange(STEPS, trial.gradients(STEPS))[0].tobytes() for workers in (first, second)]
    if first.messages != second.messages or results[0] != results[1]:
        raise CompressError("after a restart from its state it sends something else: it keeps something outside of `state`")


def _cuts(trial: _Trial) -> None:
    """The same sum where parameters are in buckets of their own, or cut at blocks."""
    whole = trial.workers()
    parts = [(part.first, trial.workers(pieces=[moved])) for part, moved in _parts(trial)]
    starts = np.cumsum([0] + [workers.compressors[0].length for _, workers in parts])
    for step in range(2):
        gradients = trial.gradients(step)
        expected = whole.exchange(step, gradients)[0]
        for start, stop, (_, workers) in zip(starts, starts[1:], parts):
            found = workers.exchange(step, [gradient[start:stop].copy() for gradient in gradients])[0]
            if found.tobytes() != expected[start:stop].tobytes():
                raise CompressError(f"the sum of {workers.compressors[0].pieces[0].name} depends on what else is in its bucket, "
                                    f"or where that is cut")


def _parts(trial: _Trial) -> Iterator[tuple[Piece, Piece]]:
    """Each piece, cut into two at a block in the middle if it may be; and the same as the only one of an array."""
    block = trial.make.block
    for piece in trial.pieces:
        size = piece.stop - piece.start
        cut = size // 2 // block * block if block else 0
        for start, stop in ((0, cut), (cut, size)) if cut else ((0, size),):
            part = Piece(piece.name, piece.start + start, piece.start + stop, piece.first + start, piece.shape)
            yield part, part._replace(start=0, stop=stop - start)


def _not_finite(trial: _Trial) -> None:
    """One number of one worker, at the ends and in the middle of each parameter: all ranks get one that is not finite there, and
    residuals stay finite."""
    there = [piece for piece in trial.pieces if piece.stop > piece.start]
    places = [sorted({piece.start, (piece.start + piece.stop) // 2, piece.stop - 1}) for piece in there]
    for turn, value in enumerate(SPECIAL):
        workers = trial.workers()
        workers.exchange(0, trial.gradients(0))
        gradients = [gradient.copy() for gradient in trial.gradients(1)]
        gradients[trial.n - 1][[where[turn % len(where)] for where in places]] = value
        with np.errstate(over="ignore", invalid="ignore"):
            result = workers.exchange(1, gradients)[0]
        for piece in there:
            if np.isfinite(result[piece.start:piece.stop]).all():
                raise CompressError(f"{value} in the gradient of {piece.name} on a rank does not arrive: the sum there is "
                                    f"finite, and training would go on")
        for state in workers.states:
            for name, array in state.items():
                if not np.isfinite(array).all():
                    raise CompressError(f'{value} in a gradient stays in state "{name}"; leave it as it was where a number is '
                                        f'not finite')


def _name(trial: _Trial, element: int) -> str:
    return next((piece.name for piece in trial.pieces if piece.start <= element < piece.stop), "nothing")


