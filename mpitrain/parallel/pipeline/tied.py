"""Parameters that several blocks share (tied embeddings), where each block has a twin of its own: `nn.Sequential.untie`.

    stage 0    embed.token.weight      g0 = sum over micro-batches of what the lookup gave    \\
    stage 1    head.weight, its twin   g1 = the same for the output layer                      >  both update with g0 + g1

Each use's gradients are summed over micro-batches and data-parallel ranks by themselves, and the uses are added last, in the
order of the blocks. So the bits do not depend on which stage a block is on, and twins, which start equal, stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.backend import array_module
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.link import Link
from mpitrain.optim import Segment


class TiedParameters:
    """The sum of each tied parameter's gradients over its uses, on whatever stages. Made, and used, by all ranks of `link`.

    `channel` has the same ranks, in the same order; `places` has the number of the block that each parameter belongs to. The
    `segments` may be parts of parameters, cut alike on all ranks.
    """

    def __init__(self, segments: Sequence[Segment], link: Link, channel: Channel, places: Mapping[str, int]):
        self.link = link
        everyone = channel.gather_objects([[s.parameter.key, places[s.name], bool(s.parameter.twin_of)] for s in segments])
        shared = {key for rank in everyone for key, _, is_twin in rank if is_twin}
        here = {s.parameter.key for s in segments}
        self._uses: list[tuple[int, list[int], list[Segment]]] = []    # Of each: tag, the ranks of its uses, our own.
        for tag, key in enumerate(sorted(shared)):                # Ranks have others of them, and one tag for each.
            if key not in here:
                continue
            uses = sorted((at, rank) for rank, held in enumerate(everyone) for name, at, _ in held if name == key)
            own = sorted((s for s in segments if s.parameter.key == key), key=lambda s: places[s.name])
            self._uses.append((tag, [rank for _, rank in uses], own))

    def add(self, gradients: Any) -> None:
        """Replaces the gradient of each use by the sum of all uses, in the flat array `gradients`."""
        link = self.link
        for tag, ranks, own in self._uses:
            parts, name = [gradients[s.start:s.stop] for s in own], own[0].name
            xp = array_module(parts[0])
            others = [rank for rank in ranks if rank != link.rank]
            arriving = [link.receive(parts[0].shape, parts[0].dtype, peer, tag, name) for peer in others]
            for peer in sorted(set(others)):
                for part in parts:
                    link.send(part, peer, tag, name)
            mine, theirs, total = iter(parts), iter(arriving), None
            for rank in ranks:
                if rank == link.rank:
                    addend = next(mine)
                else:
                    message = next(theirs)
                    message.wait()
                    addend = xp.asarray(message.array)
                total = addend.copy() if total is None else xp.add(total, addend, out=total)
            link.finish()                                     # The memory of what was sent is written next.
            for part in parts:
                part[...] = total
