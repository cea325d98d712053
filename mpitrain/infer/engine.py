"""A language model at work: token numbers in, those of the next ones out, on any mesh, with a cache of what was seen.

What comes out has the same bits however texts are batched, cut into steps, or shared by ranks: products are made row by row
(`autograd.row_by_row`), and attention adds key after key. On a pipeline a rank runs its stage for one group of texts after the
other, and waits for a group's tokens only when it is that group's turn again:

    stage 0   A1 B1 A2 B2 A3 ...          A1: the first step of group A; the last stage sends its tokens to all others
    stage 1      A1 B1 A2 B2 ...

Letters: `B` texts, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from mpitrain import nn
from mpitrain.autograd import Tensor, no_grad, row_by_row
from mpitrain.backend import keep_freed_memory
from mpitrain.backend.memory import available
from mpitrain.backend.namespace import Array, asnumpy
from mpitrain.checkpoint import store
from mpitrain.comm.job import guard
from mpitrain.comm.job.start import start
from mpitrain.comm.messages.link import Link, Message
from mpitrain.config import Config, changed
from mpitrain.errors import ConfigError
from mpitrain.infer.blocks import MOST_ROWS, Step, joined
from mpitrain.infer.cache import Cache
from mpitrain.infer.sample import Sampling, likeliest, likeliest_there
from mpitrain.infer.together import cut_by_outputs, keep_own_heads, take_all_rows
from mpitrain.nn.module import declared
from mpitrain.parallel.pipeline.inference import AHEAD
from mpitrain.run.evaluating import InUse, use
from mpitrain.run.session import Session
from mpitrain.train.build.model import make_model

ROOM = 0.5                # the part of the available memory that packed weights may take
PURPOSE = store.Purpose("generating from", "there is no checkpoint to generate from; train the run until it has saved one")
FEW = 8                                           # ranks along tp show each other pairs where one's logits are so many times more


class Choice(NamedTuple):
    """How the next token of a text is chosen; `request` and `position` are what its random number is for."""

    sampling: Sampling
    request: int
    position: int


@dataclass
class Coming:
    """The next tokens of some texts: known, or on their way from the last stage."""

    known: list[int] | None
    message: Message | None = None

    def wait(self) -> list[int]:
        if self.known is None:
            assert self.message is not None
            self.message.wait()
            self.known = [int(token) for token in self.message.array]
        return self.known


class Engine:
    """The model of a run's checkpoint; all ranks make one, call `next_tokens` and close it alike, in one order.

    Ranks along tp, ep and pp have the model together, and all call alike; those along dp have texts of their own. `capacity` is
    the length of the longest text, `slots` how many are kept at once, in `groups` that take turns on a pipeline. `known` is how
    many tokens have a text; the model may have more. On a `device` of "gpu" each rank has a whole model, in the run's precision:
    its products add in an order that follows from the number of texts, so bits are not those of other company there.
    """

    def __init__(self, config: Config, folder: Path, step: int | str | None, slots: int, known: int, *, cached: bool = True,
                 device: str = "cpu"):
        self.config = config = for_text(config, device)
        keep_freed_memory()                       # this may ask the compiler: nothing forks once MPI has started
        if device != "cpu":
            from mpitrain.backend.compiling import compile_ahead
            compile_ahead(device)
        self.session = Session(config, start().comm)
        self.session.open(config, None)
        with guard.symmetric():
            model = make_model(config)
            self.capacity = block_of(config)
            if self.session.mesh.size("tp") > 1:
                config = changed(config, mesh={"plan": cut_by_outputs(model, config.mesh.plan or model.plan)})
        self.used: InUse = use(config, self.session, folder, step, model, purpose=PURPOSE, data=False)
        with guard.symmetric():
            stage = self.used.context.stage
            stage.model.eval()
            self.device = self.used.inference.feed.device
            layout = self.used.policy.layout
            dtype = layout.dtype if self.device.xp is np else layout.compute_dtype
            self.cache = Cache(stage.model, slots, self.capacity, dtype, self.device) if cached else None
            keep_own_heads(stage.model)
            take_all_rows(stage.model)
            self._final = _final_blocks(stage.whole)
            self._pack = self._has_room(stage.model)
        n = stage.n_stages
        self._link: Link | None = self.session.mesh.link("pp", "tokens") if n > 1 else None
        self.groups = [list(range(first, slots, n)) for first in range(min(n, slots))]
        self._joined: dict[int, list[Step]] = {}
        self.slots, self.step, self.known, self._forwards = slots, self.used.found.step, known, 0

    @property
    def place(self) -> tuple[int, int]:
        """The number of this rank's copy of the model, and how many there are."""
        return self.session.mesh.coordinate("dp"), self.session.mesh.size("dp")

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of its copy of the model."""
        mesh = self.session.mesh
        return not any(mesh.coordinate(axis) for axis in ("pp", "ep", "tp"))

    def next_tokens(self, tokens: Sequence[Sequence[int]], slots: Sequence[int], starts: Sequence[int],
                    choices: Sequence[Choice]) -> Coming:
        """What follows each of B texts, as it is chosen.

        `tokens` are as many new ones of each, from place `starts` of the text on, which is kept in its one of `slots`.
        """
        logits, link = self.logits(tokens, slots, starts), self._link
        if logits is not None:
            chosen = [choice.sampling.choose(*found, choice.request, choice.position)
                      for choice, found in zip(choices, self._likeliest(logits, [choice.sampling.wanted for choice in choices]))]
            for stage in range(link.rank if link is not None else 0):
                assert link is not None
                link.send(np.array(chosen, np.int64), stage, 0, "the next tokens")
            return Coming(chosen)
        assert link is not None
        return Coming(None, link.receive((len(tokens),), np.int64, link.size - 1, 0, "the next tokens"))

    def logits(self, tokens: Sequence[Sequence[int]], slots: Sequence[int], starts: Sequence[int]) -> Array | None:
        """Logits (B, those of this rank) of what follows each text, on ranks of the last stage; None on others."""
        if self.cache is not None:
            self.cache.use(list(slots), list(starts))
        given = np.array(tokens, np.int64)
        if self.device.xp is not np:
            given = self.device.put(given) if self.cache is None else self.cache.bring(given)
        with no_grad(), row_by_row(), np.errstate(all="ignore"):
            x = self._through_stages(given)
        self._forwards += 1
        return None if x is None else x.array.reshape(len(given), -1)

    def _likeliest(self, logits: Array, wanted: Sequence[int]) -> list[tuple[Array, Array]]:
        """The largest logits of each row, as many as `wanted`, over the ranks along tp, which have some columns each."""
        head, group = self.used.placement.head, self.used.context.group
        if self.device.xp is not np:
            if all(count == 1 for count in wanted):
                return likeliest_there(logits[:, :self.known])
            logits = asnumpy(logits).astype(np.float32, copy=False)
        if head is None or group is None:
            return [likeliest(row[:self.known], count) for row, count in zip(logits, wanted)]
        most = max(wanted) if min(wanted) else head.outputs
        if most * FEW > head.outputs // group.size:
            whole = np.zeros((len(logits), head.outputs), logits.dtype)
            whole[:, head.first:head.first + logits.shape[1]] = logits
            return [likeliest(row[:self.known], count) for row, count in zip(group.sum(whole, "logits"), wanted)]
        pairs = np.full((len(logits), 2, most), -np.inf)
        for row, pair in zip(logits[:, :max(self.known - head.first, 0)], pairs):
            if len(row):
                values, places = likeliest(row, most)
                pair[0, :len(values)], pair[1, :len(values)] = values, places + head.first
        found = []
        for (values, tokens), count in zip(group.gather(pairs, -1, "likeliest tokens"), wanted):
            values, order = likeliest(values, count)
            found.append((values, tokens[order]))
        return found

    def _through_stages(self, given: Array) -> Tensor | None:
        context, x = self.used.context, None
        stage, neighbours = context.stage, context.neighbours
        kind = given.shape[0] * (self.capacity + 1) + given.shape[1]      # the shape between stages follows from it
        for number, chunk in enumerate(stage.chunks):
            virtual = stage.virtual(number)
            if virtual == 0:
                x = Tensor(given)
            else:
                assert neighbours is not None
                neighbours.expect_forward(virtual, self._forwards, kind, wait=True)
                x = Tensor(neighbours.take("F", virtual, self._forwards))
            x = self._through(chunk, x)
            if virtual < stage.n_virtual - 1:
                assert neighbours is not None
                neighbours.send_forward(x, virtual, self._forwards, kind)
                neighbours.link.finish(AHEAD)
        return x if stage.is_last else None

    def _through(self, chunk: nn.Module, x: Tensor) -> Tensor:
        """The output of a chunk; what follows the last attention sees each text's last position alone."""
        if not self._final or not isinstance(chunk, nn.Sequential):
            made: Tensor = chunk(x)
            return made[:, -1:] if self.used.context.stage.is_last and made.shape[1] > 1 else made
        if id(chunk) not in self._joined:
            self._joined[id(chunk)] = joined(list(chunk.blocks.items()), self._pack)
        few, passed = x.shape[1] == 1 and len(x) <= MOST_ROWS, 0
        for name, block, together, count in self._joined[id(chunk)]:
            if passed:
                passed -= 1
                continue
            if name in self._final and x.shape[1] > 1:
                x = x[:, -1:]
            if few and together is not None:
                x, passed = together(x), count - 1
            else:
                x = block(x)
        return x

    def _has_room(self, model: nn.Module) -> bool:
        """Whether all ranks of this host may keep their weights packed, too."""
        host = self.session.places[self.session.control.rank].host
        ranks = sum(place.host == host for place in self.session.places)
        return bool(ranks * sum(parameter.array.nbytes for parameter in model.parameters()) <= ROOM * available())

    def close(self) -> None:
        """It communicates."""
        self.session.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()


def for_text(config: Config, device: str = "cpu") -> Config:
    """A run's configuration for generating: each rank has whole parameters of its part, one chunk, and on the host it rounds no
    operands. ConfigError where a GPU would have a part of a model."""
    t, m = config.train, config.mesh
    if device != "cpu" and (m.pp, m.tp, m.ep) != (1, 1, 1):
        raise ConfigError(f"on a GPU each rank generates with a whole model, found mesh.pp = {m.pp}, mesh.tp = {m.tp}, mesh.ep = "
                          f"{m.ep}; set them to 1, or leave --device gpu out")
    rounds = "float32" if t.precision in ("bfloat16", "float16") else t.precision
    return changed(config, train={"precision": rounds if device == "cpu" else t.precision, "device": device,
                                  "reproducible": "run"},
                   mesh={"dp": 0, "cp": 1, "sequence": False, "schedule": "1f1b", "chunks": 1,
                         "stages": m.stages if m.chunks == 1 else "blocks"},
                   comm={"sharding": "none", "node_shared": False})


def block_of(config: Config) -> int:
    """The longest text that the model takes. ConfigError where it is no language model."""
    block = config.model.arguments.get("block")
    if type(block) is not int:
        raise ConfigError(f'the run\'s model, "{config.model.name}", is no language model: its [model] has no "block" and '
                          '"vocabulary"; take a run of one, such as model.name = "gpt"')
    return block


def _final_blocks(model: nn.Module) -> frozenset[str]:
    """The names of the blocks behind the last attention, all of which take positions one by one; none where one does not say."""
    if not isinstance(model, nn.Sequential):
        return frozenset()
    blocks = list(model.blocks.items())
    last = max((place for place, (_, block) in enumerate(blocks)
                if any(isinstance(module, nn.MultiHeadAttention) for module in block.modules())), default=len(blocks))
    behind = blocks[last + 1:]
    return frozenset(name for name, _ in behind) if all(declared(block, "by_position") for _, block in behind) else frozenset()
