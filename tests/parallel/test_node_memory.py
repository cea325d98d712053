"""How the nodes of ranks are written down."""

from __future__ import annotations

from mpitrain.parallel.policies.node_memory import nodes_text


def test_nodes_are_written_down_as_the_ranks_they_hold() -> None:
    assert nodes_text([0, 0, 0, 0]) == "0-3" and nodes_text([0, 0, 2, 2]) == "0-1 | 2-3"
    assert nodes_text([0, 1, 0, 1]) == "0, 2 | 1, 3" and nodes_text([0, 0, 1, 1, 0]) == "0-1, 4 | 2-3"
