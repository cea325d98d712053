"""Programs whose ranks cannot have a shared window, for test_shared_window.py: ``python window_faults.py NAME RANK`` (-1: all).

Each asks for 64 MiB where the chosen rank may not have them, prints the reason that its ranks were given, and asks once more
where it may.
"""

from __future__ import annotations

import os
import resource
import sys

from mpitrain.comm.job import guard
from mpitrain.comm.job.start import start
from mpitrain.comm.messages.progress import Progress
from mpitrain.comm.shared import window
from mpitrain.comm.shared.node import Node

NAME, CULPRIT = sys.argv[1], int(sys.argv[2])
WANTED = 64 << 20
LIMITS = {"file": resource.RLIMIT_FSIZE, "address": resource.RLIMIT_AS}


def made(node: Node) -> bool:
    block = node.block(WANTED, "test")
    if block is not None:
        assert not block.any() and block.size == WANTED
    return block is not None


def main() -> int:
    node = Node(start().comm.Dup(), Progress())
    chosen = CULPRIT in (-1, node.rank)
    if NAME in LIMITS:
        kind = LIMITS[NAME]
        kept = resource.getrlimit(kind)
        if chosen:
            taken = window._mapped() if NAME == "address" else 0
            resource.setrlimit(kind, (taken + (20 << 20), kept[1]))
        assert not made(node)
        resource.setrlimit(kind, kept)
    elif NAME == "full":                          # somebody else took the room after it was found free
        node._free = lambda: 1 << 40
        os.environ[window.FOLDER_SETTING] = sys.argv[3]
        assert not made(node)
        del os.environ[window.FOLDER_SETTING]
        node._free = window.free_bytes
    elif NAME == "elsewhere":                     # this rank sees another folder under the same name
        if chosen:
            window._map = lambda path, size: (-1, None, window._reason(2, size))          # type: ignore[assignment]
        assert not made(node)
        window._map = MAP
    if node.rank == node.size - 1:
        print(f"refused: {node.obstacle}\n", end="", flush=True)
    assert made(node)
    node.close()
    print("done\n", end="", flush=True)
    return 0


MAP = window._map

if __name__ == "__main__":
    guard.Process().run(main)
