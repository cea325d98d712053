"""A language model at work: token numbers in, logits of the next ones out, on any mesh, with a cache of what was seen.

What comes out has the same bits however texts are batched, cut into steps, or shared by ranks: products are made row by row
(`autograd.row_by_row`), and attention adds key after key. Letters: `B` texts, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from mpitrain import nn
from mpitrain.autograd import Tensor, no_grad, row_by_row
from mpitrain.backend import keep_freed_memory
from mpitrain.backend.namespace import Array
from mpitrain.checkpoint import choosing, store
from mpitrain.comm.job import guard
from mpitrain.comm.job.start import start
from mpitrain.config import Config, changed
from mpitrain.errors import ConfigError
from mpitrain.infer.blocks import MOST_ROWS, Step, joined
from mpitrain.infer.cache import Cache
from mpitrain.nn.module import declared
from mpitrain.run.evaluating import InUse, put_to_use
from mpitrain.run.session import Session
from mpitrain.train.build.model import make_model

PURPOSE = store.Purpose("generating from", "there is no checkpoint to generate from; train the run until it has saved one")


class Engine:
    """The model of a run's checkpoint; all ranks make one, call `logits` and `share` and close it alike, in one order.

    Ranks along tp and pp have the model together, and all call alike; those along dp have texts of their own. `capacity` is the
    length of the longest text, `slots` how many are kept at once.
    """

    def __init__(self, config: Config, folder: Path, step: int | str | None, slots: int, *, cached: bool = True):
        self.config = config = for_text(config)
        keep_freed_memory()                       # this may ask the compiler: nothing forks once MPI has started
        self.session = Session(config, start().comm)
        self.session.open(config, None)
        found = choosing.chosen(folder / "checkpoints", step, self.session.control, PURPOSE)
        with guard.symmetric():
            model = make_model(config)
            self.capacity = block_of(config)
            if self.session.mesh.size("tp") > 1:
                config = cut_by_outputs(config, model)
            self.used: InUse = put_to_use(config, self.session, found, model, data=False)
            stage = self.used.context.stage
            stage.model.eval()
            self.cache = Cache(stage.model, slots, self.capacity, self.used.policy.layout.dtype) if cached else None
            self._final = _final_blocks(stage.whole)
        self._joined: dict[int, list[Step]] = {}
        self.slots, self.step, self._forwards = slots, found.step, 0

    @property
    def place(self) -> tuple[int, int]:
        """The number of this rank's copy of the model, and how many there are."""
        return self.session.mesh.place, self.session.mesh.n_places

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of its copy of the model."""
        mesh = self.session.mesh
        return mesh.coordinate("pp") == mesh.coordinate("tp") == 0

    def logits(self, tokens: Sequence[Sequence[int]], slots: Sequence[int], starts: Sequence[int]) -> Array | None:
        """Logits (B, V) of what follows each of B texts, on ranks of the last stage; None on others.

        `tokens` are as many new ones of each, from place `starts` of the text on, which is kept in its one of `slots`.
        """
        if self.cache is not None:
            self.cache.use(list(slots), list(starts))
        given = np.array(tokens, np.int64)
        with no_grad(), row_by_row(), np.errstate(all="ignore"):
            x = self._through_stages(given)
        self._forwards += 1
        if x is None:
            return None
        return self._whole(x.array.reshape(len(given), -1))

    def share(self, values: list[int], known: bool) -> list[int]:
        """Whole numbers that ranks of the last stage have, on all ranks of this copy of the model."""
        context = self.used.context
        if context.stage.n_stages == 1:
            return values
        table = np.zeros(len(values))
        if known and self.session.mesh.coordinate("tp") == 0:
            table[:] = values
        assert context.parts is not None
        context.parts.allreduce(table, name="tokens")
        return [int(value) for value in table]

    @property
    def is_last(self) -> bool:
        return self.used.context.stage.is_last

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
                neighbours.link.finish()
        return x if stage.is_last else None

    def _through(self, chunk: nn.Module, x: Tensor) -> Tensor:
        """The output of a chunk; what follows the last attention sees each text's last position alone."""
        if not self._final or not isinstance(chunk, nn.Sequential):
            made: Tensor = chunk(x)
            return made if made.shape[1] == 1 else made[:, -1:]
        if id(chunk) not in self._joined:
            self._joined[id(chunk)] = joined(list(chunk.blocks.items()))
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

    def _whole(self, own: Array) -> Array:
        """Logits (B, V) of which ranks along tp have some columns each."""
        head, group = self.used.placement.head, self.used.context.group
        if head is None or group is None:
            return own
        table = np.zeros((len(own), head.outputs), own.dtype)
        table[:, head.first:head.first + own.shape[1]] = own
        return group.sum(table, "logits")

    def close(self) -> None:
        """It communicates."""
        self.session.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()


def for_text(config: Config) -> Config:
    """A run's configuration for generating: each rank has whole parameters of its part, and rounds no operands."""
    t = config.train
    return changed(config, train={"precision": "float32" if t.precision == "bfloat16" else t.precision, "device": "cpu",
                                  "reproducible": "run"},
                   mesh={"dp": 0, "cp": 1, "ep": 1, "sequence": False}, comm={"sharding": "none", "node_shared": False})


def block_of(config: Config) -> int:
    """The longest text that the model takes. ConfigError where it is no language model."""
    block = config.model.arguments.get("block")
    if type(block) is not int:
        raise ConfigError(f'the run\'s model, "{config.model.name}", is no language model: its [model] has no "block" and '
                          '"vocabulary"; take a run of one, such as model.name = "gpt"')
    return block


def cut_by_outputs(config: Config, model: nn.Module) -> Config:
    """A plan for tp in which no sum is cut: layers have some of their outputs on each rank, which are put together at once.

    Bits are then those of one rank. (A "row" adds up partial sums, one of each rank.) Changes the model: heads are not cut, so
    outputs of attention's first layer are cut where it fits.
    """
    plan = dict(config.mesh.plan or model.plan)
    for _, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.out_groups = module.out_unit = module.in_unit = 1
    styles = {name: {"row": "gathered", "column": "gathered"}.get(style, style) for name, style in plan.items()
              if style != "sequence"}
    return changed(config, mesh={"plan": styles})


def _final_blocks(model: nn.Module) -> frozenset[str]:
    """The names of the blocks behind the last attention, all of which take positions one by one; none where one does not say."""
    if not isinstance(model, nn.Sequential):
        return frozenset()
    blocks = list(model.blocks.items())
    last = max((place for place, (_, block) in enumerate(blocks)
                if any(isinstance(module, nn.MultiHeadAttention) for module in block.modules())), default=len(blocks))
    behind = blocks[last + 1:]
    return frozenset(name for name, _ in behind) if all(declared(block, "by_position") for _, block in behind) else frozenset()
