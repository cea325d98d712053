"""The placement of a run on a rank, worked out without MPI: the one order of construction.

    a model in shapes -> tied parameters apart -> cut layers (tp) -> positions (cp) -> experts (ep) -> stages (pp)
        -> buckets, shards, micro-batches, bytes

`parallel.connect` joins a placement with the ranks of a mesh; `inspect` and the memory report only read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from mpitrain.backend import Array
from mpitrain.backend.dtype import is_mixed
from mpitrain.config.sections import CommConfig, MeshConfig, TrainConfig
from mpitrain.data.columns import Columns
from mpitrain.errors import ConfigError, MeshError
from mpitrain.nn import FlatLayout, Linear, MixtureOfExperts, Module, Sequential
from mpitrain.nn.parameter import Described
from mpitrain.optim import Optimizer
from mpitrain.placement import zigzag
from mpitrain.placement.buckets import Bucket, frozen_alike, plan_buckets, runs
from mpitrain.placement.bytes import Bytes, predicted
from mpitrain.placement.experts import AXIS, cut_experts
from mpitrain.placement.shard_cuts import shared_keys, where_to_cut
from mpitrain.placement.shards import Shards, finer
from mpitrain.placement.stages import Stage, cut
from mpitrain.placement.tensor_plan import Layer, narrow, read_plan, refuse_unnamed
from mpitrain.schedules.grid import COPIES, REPLICAS, Grid
from mpitrain.schedules.microtree import Node, RankTree, share


@dataclass(frozen=True)
class Placement:
    """The part of the rank `grid` in a model without memory yet, and in each batch.

    `layers` are cut along tp, and `experts` are the mixtures cut along ep, by name.
    """

    grid: Grid
    stage: Stage
    layers: Sequence[Layer]
    experts: Sequence[tuple[str, MixtureOfExperts]]
    mesh: MeshConfig
    train: TrainConfig
    comm: CommConfig

    def at_stage(self, index: int) -> Placement:
        """The placement of the rank that differs from this one along pp only."""
        stage = self.stage
        counts = [b - a for a, b in zip(stage.bounds, stage.bounds[1:])]
        return replace(self, grid=Grid(self.grid.lengths, {**self.grid.coordinates, "pp": index}),
                       stage=cut(stage.whole, index, stage.n_stages, len(stage.chunks), counts=counts))

    @cached_property
    def n_micro(self) -> int:
        """The number of micro-batches of a global batch. MeshError where a rank, or a micro-batch, would be empty."""
        return micro_batches(self.grid, self.mesh, self.train)

    @property
    def own_micro_batches(self) -> Node:
        """The first micro-batch of this rank, and the one after its last."""
        return share(self.grid.place, self.grid.n_places, self.n_micro)

    @property
    def rounds(self) -> int:
        """The largest number of micro-batches that a rank has."""
        return -(-self.n_micro // self.grid.n_places)

    @property
    def tree(self) -> RankTree | None:
        """This rank's nodes of the one tree over all micro-batches; None where each rank has a tree of its own."""
        return RankTree(self.n_micro, self.grid.place, self.grid.n_places) if self.train.reproducible == "layout" else None

    @property
    def part(self) -> Callable[[Array], Array] | None:
        """The function that cuts this rank's positions out of samples (B, L, ...); None where it has all of them."""
        rank, n = self.grid.coordinate("cp"), self.grid.size("cp")
        return None if n == 1 else lambda x: zigzag.part(x, rank, n)

    def refuse_samples(self, x: Array, y: Array) -> None:
        """MeshError where ranks cannot share samples of these shapes."""
        if self.grid.size("cp") > 1:
            if isinstance(x, Columns):
                raise MeshError(f'mesh.cp = {self.grid.size("cp")} cuts the positions of one input, and data.x names '
                                f"{', '.join(x.values)}; set mesh.cp = 1")
            zigzag.refuse_samples(x, y, self.grid.size("cp"))

    @property
    def head(self) -> Layer | None:
        """The last layer, where its outputs stay cut for the loss."""
        return next((layer for layer in self.layers if layer.style == "vocabulary" and isinstance(layer.module, Linear)), None)

    def output_shape(self, own: Sequence[int]) -> tuple[int, ...]:
        """The shape of the model's output, of which a rank has `own`."""
        return tuple(own) if self.head is None else (*own[:-1], self.head.outputs)

    @property
    def in_step(self) -> bool:
        """Whether ranks that have samples of their own must run the model equally often: they have experts for each other."""
        return self.grid.size(AXIS) > 1

    @property
    def kind(self) -> str:
        """The states that are cut over ranks with copies: one of `config.sections.STATES`, "none" for a user's own policy."""
        return "none" if self.grid.count(REPLICAS) == 1 else self.comm.cuts

    def layout(self) -> FlatLayout:
        """The layout of this rank's parameters in flat arrays."""
        return self.stage.model.describe(dtype=self.train.precision)

    def sums_over(self, leaf: Described) -> tuple[str, ...]:
        """The axes along which ranks have copies of a leaf, whose gradients they add up."""
        return COPIES if AXIS in leaf.placement else REPLICAS

    def cuts(self, layout: FlatLayout, *, blocks: bool | None = None) -> list[int]:
        """Numbers of parameters that no bucket may join, nor those of two blocks where ranks put `blocks` together.

        By default as it is where one copy per node, if asked for, is on one node.
        """
        one_copy = self.comm.node_shared and self.grid.count(REPLICAS) > 1
        blocks = self.kind == "parameters" and not one_copy if blocks is None else blocks
        found = where_to_cut(self.stage, layout, blocks=blocks) if one_copy or self.kind != "none" else self.stage.sizes
        return finer(found, [*accumulate(runs([self.sums_over(s.parameter) for s in layout.segments])),
                             *accumulate(frozen_alike(layout.segments))])

    def buckets(self, layout: FlatLayout) -> list[Bucket]:
        """The buckets of the flat gradient, in the order in which they start."""
        elements = max(1, self.comm.bucket_bytes // layout.dtype.itemsize)
        return plan_buckets(layout.segments, layout.size, elements, self.cuts(layout))

    def shards(self, layout: FlatLayout, *, whole: bool, blocks: bool | None = None, number: int | None = None) -> Shards:
        """The slices of the ranks with copies; `whole`: of whole parameters. `number` is this rank's among them (default: by
        the grid)."""
        return Shards(layout, self.grid.number(REPLICAS) if number is None else number, self.grid.count(REPLICAS), whole=whole,
                      cuts=self.cuts(layout, blocks=blocks), bucket_bytes=self.comm.bucket_bytes,
                      alike=shared_keys(self.stage))

    def bytes(self, layout: FlatLayout, kind: str, optimizer: Optimizer, *, per_node: int = 1) -> Bytes:
        """Bytes of this rank by the formula; the optimizer, made for any storage, says what state each parameter has."""
        state = sum(optimizer.state_size(s.parameter) for s in layout.segments)
        copy = 2 if is_mixed(self.train.precision, self.train.device == "gpu") else 0
        return predicted(layout.size, kind, self.grid.count(REPLICAS), itemsize=layout.dtype.itemsize, state=state,
                         per_node=per_node, copy=copy)


def place(model: Module, grid: Grid, mesh: MeshConfig, train: TrainConfig, comm: CommConfig, *, stages: Any = None) -> Placement:
    """Cuts `model`, which has no memory yet, for the rank `grid`.

    `stages` replaces `mesh.stages`: each virtual stage's number of blocks, or a function of the model that gives these. Raises
    MeshError and ConfigError, alike on all ranks, where the model cannot be cut so.
    """
    stages = mesh.stages if stages is None else stages
    if mesh.plan and grid.size("tp") == 1:
        read_plan(model, mesh.plan)                            # A wrong plan is refused before there are ranks for it.
    n_stages = grid.size("pp")
    if isinstance(model, Sequential):
        model.separate()
        if n_stages > 1 or train.reproducible == "layout":
            model.untie()
    if callable(stages):
        enough = isinstance(model, Sequential) and len(model) >= n_stages * mesh.chunks      # `cut` says what is wrong otherwise.
        stages = stages(model) if n_stages > 1 and enough else ()
    layers = cut_layers(model, grid, mesh)
    if grid.size("cp") > 1:
        zigzag.cut_positions(model, grid, [layer.module for layer in layers if mesh.sequence and layer.style == "sequence"])
    experts = cut_experts(model, grid.coordinate(AXIS), grid.size(AXIS)) if grid.size(AXIS) > 1 else []
    counts = stages if isinstance(stages, (list, tuple)) else ()
    return Placement(grid, cut(model, grid.coordinate("pp"), n_stages, mesh.chunks, counts=counts), layers, experts, mesh, train,
                     comm)


def cut_layers(model: Module, grid: Grid, mesh: MeshConfig) -> list[Layer]:
    """The layers of the plan (by default the model's own), of which this rank keeps its part."""
    if grid.size("tp") == 1:
        return []
    layers = read_plan(model, mesh.plan or model.plan)
    if mesh.sequence and not any(layer.style == "sequence" for layer in layers):
        raise ConfigError('mesh.sequence = true cuts what lies between layers, and the plan has no "sequence" layer; set '
                          "mesh.sequence = false, or name norms and dropouts in mesh.plan")
    if mesh.sequence:
        refuse_unnamed(model, layers)
    narrow(layers, grid.coordinate("tp"), grid.size("tp"))
    return layers


def micro_batches(grid: Grid, mesh: MeshConfig, train: TrainConfig) -> int:
    """The number of micro-batches of a global batch on a grid: the number asked for, or one per data-parallel rank, times a
    number that keeps a pipeline's stages busy. MeshError where a data-parallel rank, or a micro-batch, would have none."""
    batch_size, n_stages, n_places = train.batch_size, grid.size("pp"), grid.n_places
    usual = n_places * (1 if n_stages == 1 else 4 * n_stages * mesh.chunks)
    n_micro = train.micro_batches or min(usual, max(n_places, batch_size // n_places * n_places))
    each = grid.count(grid.axes) // n_places                   # So many ranks have a copy of the model together.
    if n_micro < n_places:
        raise MeshError(f"{n_places} data-parallel ranks share {n_micro} micro-batches, so some would have none; "
                        f"set train.micro_batches to {n_places} or more, or run with -n {n_micro * each}")
    if n_micro > batch_size:
        fewer = f"train.micro_batches to {batch_size} or less" if batch_size >= n_places else f"run with -n {batch_size * each}"
        raise MeshError(f"{n_micro} micro-batches of a global batch of {batch_size} samples; "
                        f"set train.batch_size to {n_micro} or more, or {fewer}")
    return n_micro
