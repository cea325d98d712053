"""What cannot be shared out is refused by name; a run of two ranks is resumed by one; a rank that fails ends all."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runs import lines, record, write
from standing import mpirun, train

from mpitrain import models, nn
from mpitrain.comm.messages.prepare import Prepared
from mpitrain.config import CommConfig, MeshConfig, TrainConfig, load_config
from mpitrain.data.importers import import_text
from mpitrain.errors import ConfigError, MeshError
from mpitrain.parallel.gradients.bucket_sum import AllReduce
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.layers.expert_parallel import Dispatcher
from mpitrain.parallel.pipeline.nonfinite import origin_of
from mpitrain.placement.buckets import runs
from mpitrain.placement.experts import cut_experts
from mpitrain.placement.place import Placement, place
from mpitrain.plan.inspect import inspect_config
from mpitrain.schedules.grid import Grid

CONFIG = """
model = {name = "gpt", layers = 2, heads = 2, width = 16, block = 8, vocabulary = 64, experts = 4}
data = {path = "tokens", validation = "tail:0.2"}
train = {steps = 6, batch_size = 8, micro_batches = 4, eval_every = 3}
optimizer = {clip_norm = 0.5}
checkpoint = {every = 3}
log = {every = 1}
"""
OWN = '''
from mpitrain import models
def net(step, block, vocabulary):
    model = models.gpt(2, 2, 16, block, vocabulary, experts=4)
    layer, calls = model["block1"].mixture, []
    def fail(module, inputs):
        from mpitrain.comm.job.start import started
        calls.append(1)
        if started() and started().rank == 1 and len(calls) == step:
            raise ZeroDivisionError("on purpose")
    layer.before_forward(fail)
    return model
'''

SPOILT = '''
from mpitrain import models, nn, ops
from mpitrain.autograd import grad_enabled
from mpitrain.comm.job.start import started
class Spoil(nn.Module):
    """Makes all NaN on the first rank, from some micro-batch on."""
    def __init__(self, step):
        self.step, self.calls = step, 0
    def forward(self, x):
        self.calls += grad_enabled()
        return ops.multiply(x, float("nan")) if started().rank == 0 and self.calls >= self.step else ops.multiply(x, 1.0)
def net(step, block, vocabulary):
    blocks = models.gpt(2, 2, 16, block, vocabulary, experts=4).blocks
    first = next(iter(blocks))
    return nn.Sequential((first, blocks.pop(first)), ("spoil", Spoil(step)), *blocks.items())
'''


def mesh(**lengths: int) -> Any:
    """As far as refusals look at one."""
    return Grid(lengths)


def placed(model: nn.Module, grid: Grid, **keys: Any) -> Placement:
    return place(model, grid, MeshConfig(**keys), TrainConfig(), CommConfig())


def gpt(**more: Any) -> nn.Sequential:
    return models.gpt(2, 2, 8, 8, 11, **more)


@pytest.mark.parametrize(("call", "kind", "message"), [
    (lambda: cut_experts(gpt(), 0, 2), MeshError, "mesh.ep = 2 shares out experts over ranks, and the model has none; set"),
    (lambda: cut_experts(gpt(experts=6), 0, 4), MeshError,
     'mesh.ep = 4 does not divide the 6 experts of "block0.mixture"; the nearest that fits the whole model: mesh.ep = 3 or 6'),
    (lambda: cut_experts(gpt(experts=3), 0, 5), MeshError, "the nearest that fits the whole model: mesh.ep = 3"),
    (lambda: placed(gpt(experts=2), mesh(cp=2)), ConfigError,
     'mesh.cp = 2 cuts samples, and experts ('),
])
def test_what_cannot_be_shared_out_is_refused_by_name(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message.replace("(", r"\(")):
        call()


def test_each_rank_keeps_its_share_of_the_experts_and_all_of_the_router() -> None:
    model = gpt(experts=6, bias=True)
    layer = cut_experts(model, 1, 3)[0][1]
    assert layer.wide.shape == (2, 32, 8) and layer.narrow_bias.shape == (2, 8) and layer.wide.offset == (2, 0, 0)
    assert layer.router.weight.shape == (6, 8) and not layer.router.weight.placement and layer.experts == 6


def test_inspect_shows_what_a_rank_has_and_who_has_which_samples(tmp_path: Any) -> None:
    import_text(text(tmp_path), tmp_path / "tokens")
    shown = "\n".join(inspect_config(load_config(write(tmp_path, CONFIG), ["mesh.ep=2"]), 4))
    assert "mesh pp=1 x dp=2 x ep=2 x tp=1" in shown and "rank 3: micro-batches 3..3" in shown
    assert re.search(r"block0.mixture.wide +2x64x16 +ep cuts dim 0", shown) and "5 gradient buckets" in shown


class Sums:
    """A channel that notes what is summed over it."""

    def __init__(self, size: int):
        self.size, self.names = size, list[str]()

    def prepare(self, array: Any, name: str) -> Prepared:
        return Prepared(lambda: self.start_allreduce(array, name))

    def start_allreduce(self, array: Any, name: str) -> Any:
        self.names.append(name)
        return SimpleNamespace(wait=lambda: None, done=True)


def test_experts_have_buckets_of_their_own_on_the_channel_of_their_copies() -> None:
    model = gpt(experts=2)
    storage = model.initialize(0)
    all_, copies = Sums(4), Sums(2)
    apart = [copies if "wide" in s.name or "narrow" in s.name else None for s in storage.segments]
    reducer = GradientReducer(storage, AllReduce(all_), bucket_bytes=1 << 30, apart=apart)
    assert len(reducer.buckets) == 5                            # head to tail: dense, experts, dense, experts, dense
    reducer.begin()
    reducer.begin_micro_batch(last=True)
    tokens = np.random.default_rng(0).integers(0, 11, (2, 9))
    nn.LOSSES["cross_entropy"]()(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    reducer.finish()
    assert len(all_.names) == 3 and len(copies.names) == 2
    assert all("mixture.wide" in name and "mixture.narrow" in name for name in copies.names)
    assert runs(["a", "a", None, "b", "b"]) == [2, 1, 2]
    reducer.close()


def test_where_values_are_not_finite_is_said_without_other_ranks() -> None:
    """A rank that has some of the experts looks alone: those elsewhere are not asked."""
    tokens = np.random.default_rng(0).integers(0, 11, (2, 8))
    model = gpt(experts=4)
    elsewhere: Any = SimpleNamespace(rank=1, size=2, prepare=lambda array, name: None)      # what it prepares cannot be run
    for path, layer in cut_experts(model, 1, 2):
        layer.across = across = Dispatcher(elsewhere, path)
    model.initialize(0)
    assert origin_of(model, tokens).text.startswith("an expert of another rank (mesh.ep), or the loss function")
    model["block1"].norm2.weight.array[...] = model["block1"].mixture.wide.array[...] = 1e30
    assert origin_of(model, tokens).text == 'the layer "block1.mixture" (MixtureOfExperts)'
    assert model["block1"].mixture.across is across


def test_a_run_of_shared_experts_is_resumed_and_evaluated_by_one_rank(tmp_path: Any) -> None:
    """Its losses, and the tallies in its metrics, are those of one rank all the way; the order of micro-batches is the same."""
    import_text(text(tmp_path), tmp_path / "tokens")
    config = write(tmp_path, CONFIG)
    assert train(1, config, "run.out=one").rc == 0
    first = train(2, config, "mesh.ep=2", "train.steps=3", "run.out=two", "optimizer.schedule=constant")
    assert first.rc == 0, first.err
    again = train(1, config, "run.out=two", "--resume")
    assert again.rc == 0, again.err
    assert record(tmp_path / "two")["steps"] == 6
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    result = mpirun(2, "-m", "mpitrain", "evaluate", "two", "mesh.ep=2", cwd=tmp_path)
    assert json.loads(result.out)["loss"] == pytest.approx(one[-1]["loss"], rel=1e-5), result.err
    assert len(one) == len(two)
    for expected, found in zip(one, two):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        if "split" not in expected:
            assert found["balance"] == pytest.approx(expected["balance"], rel=1e-3) and 0.9 < found["balance"] < 4
            assert found["dropped"] == pytest.approx(expected["dropped"], abs=0.02) and 0 <= found["dropped"] < 0.5


def test_a_rank_that_fails_while_others_wait_for_its_rows_ends_all(tmp_path: Any) -> None:
    import_text(text(tmp_path), tmp_path / "tokens")
    (tmp_path / "own.py").write_text(OWN)
    config = write(tmp_path, CONFIG.replace('"gpt", layers = 2, heads = 2, width = 16', '"own.py:net", step = 9')
                   .replace(", experts = 4", ""))
    result = train(2, config, "mesh.ep=2")
    line, = result.error_lines
    assert result.rc == 70 and "ZeroDivisionError" in line and "on purpose" in line


@pytest.mark.slow
def test_a_loss_that_an_earlier_stage_made_nan_on_one_rank_is_refused_there(tmp_path: Any) -> None:
    """The ranks that share experts with the next stage's go on meanwhile: nobody misses a message, and the layer is named."""
    import_text(text(tmp_path), tmp_path / "tokens")
    (tmp_path / "own.py").write_text(SPOILT)
    config = write(tmp_path, CONFIG.replace('"gpt", layers = 2, heads = 2, width = 16', '"own.py:net", step = 9')
                   .replace(", experts = 4", "").replace("micro_batches = 4", "micro_batches = 8"))
    result = train(4, config, "mesh.ep=2", "mesh.pp=2", "mesh.schedule=zb_h1")
    line, = result.error_lines
    assert "E_NAN" in line and 'comes from the layer "spoil' in line, result.err


def text(folder: Any) -> Any:
    path = folder / "text.txt"
    path.write_text("".join(chr(97 + n % 26) for n in np.cumsum(np.random.default_rng(1).integers(1, 4, 1200))))
    return path
