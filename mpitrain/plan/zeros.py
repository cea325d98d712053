"""What a run has pruned, weight by weight, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.kernels.sparse import to_blocks, to_csr
from mpitrain.nn.sparse import form_that_pays
from mpitrain.plan.memory_lines import table


def zeros_lines(found: Checkpoint, names: Sequence[str]) -> Iterator[str]:
    """The share of zeros of each weight, and the form in which a product by it is faster, where there is one, with its bytes."""
    rows, zeros, total = [], 0, 0
    for name in names:
        w = found.read(f"parameters/{name}")
        none = int(w.size - np.count_nonzero(w))
        zeros, total = zeros + none, total + int(w.size)
        form = form_that_pays(w) if w.ndim == 2 else ""
        size = (to_blocks(w) if form == "blocks" else to_csr(w)).nbytes if form else 0
        rows.append((name, f"{none:,} of {w.size:,}", f"{none / max(1, w.size):.1%}",
                     f"{form}, {size:,} of {w.nbytes:,} bytes" if form else ""))
    yield from table(("pruned weight", "zeros", "share", "faster as"), [*rows, ("all", f"{zeros:,} of {total:,}",
                                                                                f"{zeros / max(1, total):.1%}", "")])
