"""Connectionist temporal classification (Graves, Fernandez, Gomez, Schmidhuber, 2006): -log of the sum over all alignments.

An alignment gives each of T times a label or the blank; labels that repeat without a blank between count once. Forward and
backward sums run over the labels with blanks between them, 2 S + 1 places, in logarithms and in float64, for all samples at
once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array, asnumpy
from mpitrain.errors import ShapeError
from mpitrain.ops.inputs import as_tensor, raw
from mpitrain.ops.losses import constant, reduced

__all__ = ["ctc_loss"]

Host = np.ndarray[Any, Any]


class CTC(Function):
    """(N,) losses of log-probabilities (T, N, C) and padded labels (N, S)."""

    floats = 1

    @staticmethod
    def forward(ctx: Context, log_p: Array, *, labels: Host, times: Host, lengths: Host, blank: int,
                zero_infinity: bool) -> Array:
        host = asnumpy(log_p).astype(np.float64)
        places = np.full((len(labels), 2 * labels.shape[1] + 1), blank)
        places[:, 1::2] = labels
        scores = np.take_along_axis(host, np.broadcast_to(places, (host.shape[0], *places.shape)), 2)
        alpha = forward_sums(scores, places, blank)
        total = ends(alpha, times, lengths)
        ctx.zero, ctx.blank = zero_infinity & np.isinf(total), blank
        ctx.save(log_p, host, places, scores, alpha, total, times, lengths)
        return ctx.xp.asarray(np.where(ctx.zero, 0.0, -total).astype(log_p.dtype))

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        log_p, host, places, scores, alpha, total, times, lengths = ctx.saved
        beta = backward_sums(scores, places, ctx.blank, times, lengths)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            share = np.exp(alpha + beta - scores - total[:, None])     # of the alignments that pass a place at a time
        found, rows = np.exp(host), np.arange(len(places))[:, None]
        for t in range(len(found)):
            np.subtract.at(found[t], (rows, places), share[t])
        found *= asnumpy(grad).astype(np.float64)[:, None]
        found[np.arange(len(found))[:, None] >= times] = 0
        found[:, ctx.zero] = 0
        result: Array = ctx.xp.asarray(found.astype(log_p.dtype))
        return result


def skips(places: Host, blank: int) -> Host:
    """Whether a place may follow the one two before it: a label after another label."""
    allowed = np.zeros(places.shape, bool)
    allowed[:, 2:] = (places[:, 2:] != blank) & (places[:, 2:] != places[:, :-2])
    return allowed


def moved(x: Host, by: int) -> Host:
    """x with its last dim moved by 1 or 2 places to the right (left: less than 0), -inf where nothing comes."""
    out = np.full_like(x, -np.inf)
    if by > 0:
        out[:, by:] = x[:, :-by]
    else:
        out[:, :by] = x[:, -by:]
    return out


def forward_sums(scores: Host, places: Host, blank: int) -> Host:
    """The log of the sum over beginnings of alignments that are at a place (N, 2 S + 1) at each time."""
    alpha, over = np.full_like(scores, -np.inf), skips(places, blank)
    if len(scores):
        alpha[0, :, :2] = scores[0, :, :2]
    for t in range(1, len(scores)):
        before = alpha[t - 1]
        sums = np.logaddexp(before, moved(before, 1))
        alpha[t] = np.logaddexp(sums, np.where(over, moved(before, 2), -np.inf)) + scores[t]
    return alpha


def ends(alpha: Host, times: Host, lengths: Host) -> Host:
    """The log of the sum over whole alignments of each sample: they end with the last label, or the blank after it."""
    rows = np.arange(len(times))
    if not len(alpha):
        return np.where(lengths == 0, 0.0, -np.inf)
    last = alpha[np.maximum(times - 1, 0), rows]
    whole = np.logaddexp(last[rows, 2 * lengths], np.where(lengths > 0, last[rows, np.maximum(2 * lengths - 1, 0)], -np.inf))
    return np.where(times == 0, np.where(lengths == 0, 0.0, -np.inf), whole)


def backward_sums(scores: Host, places: Host, blank: int, times: Host, lengths: Host) -> Host:
    """The same over the rests of alignments, from each sample's own end."""
    beta, rows = np.full_like(scores, -np.inf), np.arange(len(times))
    over, after = skips(places, blank), np.full(scores.shape[1:], -np.inf)
    from_two_on = np.zeros_like(over)
    from_two_on[:, :-2] = over[:, 2:]
    last = np.full(scores.shape[1:], -np.inf)
    last[rows, 2 * lengths] = 0.0
    last[rows, np.maximum(2 * lengths - 1, 0)] = 0.0
    for t in reversed(range(len(scores))):
        sums = np.logaddexp(after, moved(after, -1))
        sums = np.logaddexp(sums, np.where(from_two_on, moved(after, -2), -np.inf))
        after = np.where((times - 1 == t)[:, None], last, sums) + scores[t]
        beta[t] = after
    return beta


def ctc_loss(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: str = "mean",
             zero_infinity: bool = False) -> Tensor:
    """-log p(targets) for log-probabilities (T, N, C) or (T, C), as log_softmax gives them.

    `targets` are integer labels (N, S), of which each sample has `target_lengths`, or all samples' in one row. "mean" divides
    each loss by its number of labels (at least 1) and takes the mean. A sample that has fewer times than its labels need costs
    infinity, or with `zero_infinity` 0, and its gradient is 0 then. The gradient is that of the logits behind `log_probs`, as in
    PyTorch; there is a first derivative only.
    """
    log_p = as_tensor(log_probs)
    single = len(log_p.shape) == 2
    log_p = log_p.reshape(log_p.shape[0], 1, log_p.shape[1]) if single else log_p
    if len(log_p.shape) != 3:
        raise ShapeError(f"ctc_loss: log_probs of shape {log_p.shape}; expected (T, N, C) or (T, C)")
    n_times, n, classes = log_p.shape
    labels = np.atleast_1d(asnumpy(raw(targets)) if hasattr(raw(targets), "dtype") else np.asarray(raw(targets), np.int64))
    times, lengths = (np.asarray(raw(given), np.int64).reshape(-1) for given in (input_lengths, target_lengths))
    if len(times) != n or len(lengths) != n or labels.dtype.kind not in "iu":
        raise ShapeError(f"ctc_loss: {n} samples want integer labels and as many lengths, found {labels.dtype} and {len(times)} "
                         f"and {len(lengths)} lengths")
    if (times < 0).any() or times.max(initial=0) > n_times or (lengths < 0).any() or not 0 <= blank < classes:
        raise ShapeError(f"ctc_loss: lengths {times.tolist()} of inputs of {n_times} times, {lengths.tolist()} of targets, "
                         f"blank {blank} of {classes} classes")
    padded = padded_labels(labels, lengths, n, blank)
    if padded.size and (padded.min() < 0 or padded.max() >= classes):
        raise ShapeError(f"ctc_loss: a label lies outside of 0 ... {classes - 1}")
    terms = CTC.apply(log_p, labels=padded, times=times, lengths=lengths, blank=blank, zero_infinity=zero_infinity)
    if reduction == "mean":
        terms = terms * constant(terms, 1.0 / np.maximum(lengths, 1))
    return terms.reshape(()) if single and reduction == "none" else reduced(terms, reduction)


def padded_labels(labels: Host, lengths: Host, n: int, blank: int) -> Host:
    """(N, S): each sample's own labels, then blanks; S is the largest length."""
    most = int(lengths.max(initial=0))
    if labels.ndim == 2 and (labels.shape[0] != n or labels.shape[1] < most) or labels.ndim == 1 and len(labels) < lengths.sum():
        raise ShapeError(f"ctc_loss: targets of shape {labels.shape} for {n} samples of {lengths.tolist()} labels")
    padded, begin = np.full((n, most), blank, np.int64), 0
    for i, length in enumerate(lengths):
        padded[i, :length] = labels[i, :length] if labels.ndim == 2 else labels[begin:begin + length]
        begin += math.floor(length)
    return padded
