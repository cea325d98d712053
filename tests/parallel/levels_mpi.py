"""Sites that train apart and meet: against gradient averaging, against NumPy, on every kind of mesh, and by bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from meshes import gpt, job, losses, mlp, samples

from mpitrain import nn, optim
from mpitrain.bench.train import Memory
from mpitrain.checkpoint.copies import digest
from mpitrain.comm.messages.meter import metered
from mpitrain.data import Transforms
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.observers.agreement import Agreement
from mpitrain.train.observers.observer import Watched

SGD = {"optimizer": lambda storage: optim.SGD(storage, lr=1 / 64, momentum=0.0), "clip_norm": 0.0}


def level(**keys: Any) -> dict[str, Any]:
    return {"levels": (keys,)}


def arrays(run: Any) -> dict[str, np.ndarray]:
    return {p.name: np.array(p.master) for p in run.state.model.parameters()}


def steps(run: Any, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        run.trainer.train_step(run.trainer.loader.load(step))


def needs(comm: Any, n: int) -> None:
    if comm.size < 2 or comm.size % n:
        pytest.skip(f"a multiple of {n} ranks")


def test_sites_that_meet_after_every_step_average_gradients(comm: Any) -> None:
    needs(comm, comm.size)
    with job(comm, mlp, {"dp": comm.size}, micro_batches=comm.size * 2, batch_size=24, **SGD) as dense:
        steps(dense, 5)
        expected = arrays(dense)
    with job(comm, mlp, {"site": comm.size}, micro_batches=comm.size * 2, batch_size=24, **SGD, **level(every=1)) as run:
        steps(run, 5)
        for name, array in arrays(run).items():
            assert abs(array - expected[name]).max() <= 1e-6 * abs(expected[name]).max(), name


def whole_numbers() -> Inputs:
    rng = np.random.default_rng(3)
    x, y = (rng.integers(-2, 3, (96, width)).astype(np.float64) for width in (6, 2))
    source = Memory(x, y, "values")
    return Inputs(source, range(64), source, range(64, 96), Transforms())


def test_on_a_power_of_two_of_sites_it_is_gradient_averaging_to_the_bit_where_nothing_is_rounded(comm: Any) -> None:
    if comm.size not in (2, 4):
        pytest.skip("a power of two of ranks")
    found = []
    for mesh, more in (({"dp": comm.size}, {}), ({"site": comm.size}, level(every=1))):
        with job(comm, lambda: nn.Sequential(("head", nn.Linear(6, 2))), mesh, inputs=whole_numbers(), loss=nn.LOSSES["mse"](),
                 precision="float64", micro_batches=comm.size, **SGD, **more) as run:
            for p in run.state.model.parameters():
                p.array[...] = np.arange(p.size).reshape(p.shape) % 3
            steps(run, 3)
            found.append(arrays(run))
    for name in found[0]:
        assert np.array_equal(found[0][name], found[1][name]) and found[0][name].any(), name


class Reference:
    """DiLoCo of two layers in float64, all sites in one process: AdamW inside, Nesterov outside, fragments that stream."""

    def __init__(self, run: Any, sites: int, *, every: int, fragments: int = 1, delay: int = 0, alpha: float = 1.0,
                 after: int = 0, lr: float = 0.7, momentum: float = 0.6):
        self.every, self.fragments, self.delay, self.alpha, self.after, self.lr = every, fragments, delay, alpha, after, lr
        self.momentum, self.plan = momentum, run.plan.steps
        self.start = arrays(run)
        self.sites = [{name: [a.copy(), 0.0, 0.0] for name, a in self.start.items()} for _ in range(sites)]
        self.outer = {name: np.zeros_like(a) for name, a in self.start.items()}
        self.fragment = {name: i * fragments // len(self.start) for i, name in enumerate(self.start)}
        self.flying: list[tuple[int, str, np.ndarray]] = []

    def step(self, t: int, batches: list[tuple[np.ndarray, np.ndarray]]) -> None:
        gradients = [self.gradient(site, *batch) for site, batch in zip(self.sites, batches)]
        for k, site in enumerate(self.sites):
            for name, state in site.items():
                g = sum(g[name] for g in gradients) / len(gradients) if t <= self.after else gradients[k][name]
                state[1] = 0.9 * state[1] + 0.1 * g
                state[2] = 0.999 * state[2] + 0.001 * g * g
                state[0] = state[0] - 3e-3 * (state[1] / (1 - 0.9 ** t)) / (np.sqrt(state[2] / (1 - 0.999 ** t)) + 1e-8)
        if t <= self.after:
            self.start = {name: state[0].copy() for name, state in self.sites[0].items()}
            return
        last, done = t == self.plan, t - self.after
        self.land([one for one in self.flying if one[0] <= t or last], last)
        for name, f in self.fragment.items():
            if last or (done >= self.every and (done - f * self.every // self.fragments) % self.every == 0):
                change = sum(self.start[name] - site[name][0] for site in self.sites) / len(self.sites)
                self.flying.append((t + self.delay, name, change))
        self.land([one for one in self.flying if one[0] <= t or last], last)

    def land(self, landing: list[tuple[int, str, np.ndarray]], last: bool) -> None:
        for one in landing:
            self.flying.remove(one)
            _, name, d = one
            self.outer[name] = self.momentum * self.outer[name] + d
            self.start[name] = self.start[name] - self.lr * (d + self.momentum * self.outer[name])
            for site in self.sites:
                site[name][0] = site[name][0] + (1.0 if last else self.alpha) * (self.start[name] - site[name][0])

    @staticmethod
    def gradient(site: dict[str, Any], x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
        (w, *_), (b, *_), (v, *_), (c, *_) = site.values()
        hidden = np.tanh(x @ w.T + b)
        p = np.exp(hidden @ v.T + c)
        p = (p / p.sum(1, keepdims=True) - np.eye(10)[y]) / len(x)
        back = (p @ v) * (1 - hidden ** 2)
        return dict(zip(site, (back.T @ x, back.sum(0), p.T @ hidden, p.sum(0))))


def two_layers() -> nn.Sequential:
    return nn.Sequential(("one", nn.Linear(20, 8)), ("tanh", nn.Tanh()), ("two", nn.Linear(8, 10)))


@pytest.mark.parametrize("options", [
    {"every": 2}, {"every": 3, "after": 4}, {"every": 4, "fragments": 2}, {"every": 4, "fragments": 2, "delay": 1, "alpha": 0.5},
    {"every": 5, "fragments": 2, "delay": 1}], ids=str)
@pytest.mark.parametrize("inside", [1, 2])
def test_every_array_is_that_of_a_simulation_in_numpy(comm: Any, options: dict[str, Any], inside: int) -> None:
    needs(comm, 2 * inside)
    sites = comm.size // inside
    adam = {"optimizer": lambda storage: optim.AdamW(storage, lr=3e-3, weight_decay=0.0), "clip_norm": 0.0,
            "precision": "float64"}
    outer = {"outer": "nesterov", "lr": 0.7, "momentum": 0.6}
    with job(comm, two_layers, {"site": sites, "dp": inside}, micro_batches=comm.size, batch_size=16 // comm.size * comm.size,
             steps=20, **adam, **level(**outer, **options)) as run:
        reference, source = Reference(run, sites, **options), samples(mlp())
        fragment_of = run.policy.level.fragment_of
        reference.fragment = {name: fragment_of[name] for name in reference.start}
        for step in range(20):
            steps(run, 1, step)
            rows = run.trainer.loader.sampler.rows(step)
            batches = [source.training.read(part) for part in np.split(rows, sites)]
            reference.step(step + 1, [(x.astype(np.float64), y) for x, y in batches])
            own = reference.sites[run.context.mesh.coordinate("site")]
            for name, array in arrays(run).items():
                assert abs(array - own[name][0]).max() < 1e-12, (step, name)
        one = run.policy.level
        for s in run.policy.storage.segments:
            assert abs(one.start[s.start:s.stop] - reference.start[s.name].reshape(-1)).max() < 1e-12
            assert abs(one.state["momentum"][s.start:s.stop] - reference.outer[s.name].reshape(-1)).max() < 1e-12
        assert not one.apart, "the last step ends the round of all fragments"


@pytest.mark.parametrize("delay", [0, 2])
def test_gradients_of_sites_are_those_of_all_ranks_some_steps_ago(comm: Any, delay: int) -> None:
    needs(comm, comm.size)
    options = {"micro_batches": comm.size, "batch_size": 12, **SGD}
    with job(comm, two_layers, {"site": comm.size}, **options, **level(what="gradients", delay=delay)) as run, \
            job(comm, two_layers, {"dp": comm.size}, **options) as dense:
        for step in range(6):
            steps(run, 1, step)
            late = list(run.policy.level.mean.late)
            assert len(late) == min(step + 1, delay)
        run.policy.level.wait()
        assert len({digest(array) for array in arrays(run).values()}) > 1
        if delay == 0:
            steps(dense, 6)
            for name, array in arrays(dense).items():
                assert abs(array - arrays(run)[name]).max() < 1e-6
        else:                                                 # the first two steps update nothing: then the same gradients come
            first = arrays(dense)
            with job(comm, two_layers, {"site": comm.size}, **options, **level(what="gradients", delay=delay)) as again:
                steps(again, delay)
                assert all(np.array_equal(first[name], array) for name, array in arrays(again).items())
                steps(again, 1, delay)
                steps(dense, 1)
                for name, array in arrays(dense).items():
                    assert abs(array - arrays(again)[name]).max() < 1e-6, "the gradient of the first step"


def test_a_site_may_be_cut_in_any_way(comm: Any) -> None:
    if comm.size != 4:
        pytest.skip("two sites of two ranks")
    options = {"steps": 8, **level(every=4, outer="nesterov", lr=0.7, momentum=0.6, fragments=2, delay=1, alpha=0.5)}

    def plain() -> nn.Sequential:
        return gpt(dropout=0.0)
    expected = losses(comm, plain, {"site": 2, "dp": 2}, **options)
    for mesh, more in (({"pp": 2}, {}), ({"tp": 2}, {}), ({"cp": 2}, {}), ({"dp": 2}, {"sharding": "optimizer"}),
                       ({"dp": 2}, {"sharding": "parameters"}), ({"dp": 2}, {"node_shared": True})):
        assert losses(comm, plain, {"site": 2, **mesh}, **options, **more) == pytest.approx(expected, rel=2e-5), (mesh, more)
    alone = losses(comm, plain, {"site": 2, "dp": 2}, **options | level(every=20))
    assert alone != pytest.approx(expected, rel=2e-5), "the comparison sees meetings"


@pytest.mark.parametrize("compress", ["", "int8", "int4", "topk:0.1"])
def test_bytes_are_counted_as_they_are_posted_and_what_sites_agree_on_has_equal_bits(comm: Any, compress: str) -> None:
    needs(comm, comm.size)
    with job(comm, mlp, {"site": comm.size}, micro_batches=comm.size, batch_size=12, steps=9, compare_every=1,
             **level(every=4, outer="nesterov", lr=0.7, momentum=0.6, compress=compress)) as run:
        compared, one = Agreement(run.state, run.channel, 1), run.policy.level
        compared.begin(Watched(comm.rank, comm.size, 0, run.plan, None, print))
        posted = metered(one.channel, [0] * comm.size)
        steps(run, 8)
        assert posted.sent == one.sent_bytes > 0
        compared.before_checkpoint(8)
        at_a_meeting = {digest(array) for array in comm.allgather(run.policy.values.copy())}
        assert len(at_a_meeting) == 1 and not one.apart
        dense = 2 * one.posted(one.size)
        assert compress == "" or one.sent_bytes < {"int8": 0.5, "int4": 0.3, "topk:0.1": 0.9}[compress] * dense
        if comm.rank == 1:
            one.start[:1].view(np.uint32)[...] ^= 1
        with pytest.raises(Exception, match='what sites have agreed on, "start/'):
            compared.before_checkpoint(8)


def test_a_residual_is_what_messages_have_left_out(comm: Any) -> None:
    needs(comm, comm.size)
    with job(comm, mlp, {"site": comm.size}, micro_batches=comm.size, batch_size=12, steps=9, optimizer=SGD["optimizer"],
             **level(every=1, compress="int4")) as run, \
            job(comm, mlp, {"site": comm.size}, micro_batches=comm.size, batch_size=12, steps=9, optimizer=SGD["optimizer"],
                **level(every=1)) as dense:
        one = run.policy.level
        before = np.array(run.policy.values)
        steps(run, 1)
        steps(dense, 1)
        owed = sum(comm.allgather(sum_of(one.own_states()["outer_error"], one))) / comm.size
        owed += sum(comm.allgather(sum_of(one.owned_states()["sum_error"], one))) / comm.size
        moved, wanted = before - run.policy.values, before - dense.policy.values
        assert abs(moved - wanted).max() > 1e-5 and abs(moved + owed - wanted).max() < 1e-6


def sum_of(parts: Any, one: Any) -> np.ndarray:
    flat = one.storage.new_flat()
    for s, values in parts:
        flat[s.start:s.start + values.size] += values
    return flat


def normed() -> nn.Sequential:
    return nn.Sequential(("one", nn.Linear(20, 8)), ("norm", nn.BatchNorm1d(8)), ("two", nn.Linear(8, 10)))


def test_running_statistics_meet_and_the_mean_of_sites_is_what_is_evaluated(comm: Any) -> None:
    needs(comm, comm.size)
    with job(comm, normed, {"site": comm.size}, micro_batches=comm.size, batch_size=12, steps=9, **level(every=4)) as run:
        one, buffers = run.policy.level, [b for _, b in run.state.model.named_buffers() if b.array.dtype.kind == "f"]
        steps(run, 2)
        own = [np.array(b.array) for b in buffers], np.array(run.policy.values)
        theirs = comm.allgather(own)
        assert not np.array_equal(theirs[0][1], theirs[1][1]) and not np.array_equal(theirs[0][0][0], theirs[1][0][0])
        with one.in_use():
            mean = sum(values for _, values in theirs) / comm.size
            assert abs(run.policy.values - mean).max() < 1e-6
            for i, b in enumerate(buffers):
                assert abs(b.array - sum(found[i] for found, _ in theirs) / comm.size).max() < 1e-6
        assert np.array_equal(run.policy.values, own[1]) and all(np.array_equal(b.array, a) for b, a in zip(buffers, own[0]))
        steps(run, 2, 2)
        met = comm.allgather(([np.array(b.array) for b in buffers], np.array(run.policy.values)))
        assert all(np.array_equal(a, b) for a, b in zip(met[0][0], met[1][0])) and np.array_equal(met[0][1], met[1][1])
        assert set(one.fields) == {"round", "drift", "sync_exposed_s", "wire_bytes", "wire_largest_bytes"}
        assert one.fields["round"] == 1 and 1e-4 < one.fields["drift"] < 1.0
