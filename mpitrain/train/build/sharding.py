"""What `comm.sharding` says that it takes."""

from __future__ import annotations

from collections.abc import Sequence


def memory_text(everyone: Sequence[Sequence[int]], kind: str, *, per_node: bool = False) -> str:
    """One line: what the rank that keeps most keeps of parameters, gradients and optimizer state; with one copy `per_node`, its
    share of that."""
    largest = max(everyone, key=sum)
    parts = ", ".join(f"{name} {n / 2**20:,.2f} MiB" for name, n in zip(("parameters", "gradients", "optimizer"), largest))
    return f'comm.sharding = "{kind}"{", one copy per node" if per_node else ""}: a rank keeps {parts}'
