"""The memory that `comm.sharding` needs, in words."""

from __future__ import annotations

from collections.abc import Sequence


def memory_text(everyone: Sequence[Sequence[int]], kind: str, *, per_node: bool = False) -> str:
    """One line: parameters, gradients and optimizer state of the rank that keeps most; with one copy `per_node`, its
    share of that."""
    largest = max(everyone, key=sum)
    parts = ", ".join(f"{name} {n / 2**20:,.2f} MiB" for name, n in zip(("parameters", "gradients", "optimizer"), largest))
    return f'comm.sharding = "{kind}"{", one copy per node" if per_node else ""}: a rank keeps {parts}'
