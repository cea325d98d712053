"""The number of micro-batches of a global batch."""

from __future__ import annotations

from mpitrain.errors import MeshError


def count_micro_batches(asked: int, batch_size: int, n_stages: int, n_ranks: int, chunks: int = 1, *, each: int = 1) -> int:
    """M: the number asked for, or one per data-parallel rank, times a number that keeps a pipeline's stages busy.

    `each` ranks have a copy of the model together. Raises MeshError where one of the `n_ranks` copies, or a micro-batch, would
    have none.
    """
    usual = n_ranks * (1 if n_stages == 1 else 4 * n_stages * chunks)
    n_micro = asked or min(usual, max(n_ranks, batch_size // n_ranks * n_ranks))
    if n_micro < n_ranks:
        raise MeshError(f"{n_ranks} data-parallel ranks share {n_micro} micro-batches, so some would have none; "
                        f"set train.micro_batches to {n_ranks} or more, or run with -n {n_micro * each}")
    if n_micro > batch_size:
        fewer = f"train.micro_batches to {batch_size} or less" if batch_size >= n_ranks else f"run with -n {batch_size * each}"
        raise MeshError(f"{n_micro} micro-batches of a global batch of {batch_size} samples; "
                        f"set train.batch_size to {n_micro} or more, or {fewer}")
    return n_micro
