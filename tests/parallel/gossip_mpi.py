"""Gossip on real ranks: each round against the product with the graph's matrix, and what rounds must keep."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.nn.init import zeros
from mpitrain.parallel.levels.gossip import Gossip
from mpitrain.parallel.levels.neighbours import Neighbours
from mpitrain.schedules import graphs
from mpitrain.schedules.graph_check import check_graph, matrix

GRAPHS = ["ring", "torus", "exponential", "one_peer_exponential", "complete", "matching"]


@pytest.fixture
def channel(comm):
    made = Channel(comm.Dup(), "gossip")
    yield made
    made.close()


def gossip(channel, name, elements, dtype="float64", method="d-psgd"):
    proved = check_graph(getattr(graphs, name), channel.size, method=method, name=name)
    return Gossip(channel, proved, elements, dtype)


def once(made, values):
    """A round on `values`, in place."""
    made.outgoing[...] = values
    made.start()
    values[...] = made.finish()


def everyone(channel, values):
    """(n, elements) of all ranks."""
    found = np.zeros((channel.size, values.size))
    found[channel.rank] = values
    channel.allreduce(found.reshape(-1), name="everyone")
    return found


def own(rank, elements, dtype="float64"):
    return np.random.default_rng([rank, elements]).normal(size=elements).astype(dtype)


@pytest.mark.parametrize("name", [*GRAPHS, "random"])
@pytest.mark.parametrize("elements", [1, 1000])
def test_a_round_is_the_product_with_the_matrix_of_the_graph(channel, name, elements):
    method = "push-sum" if name == "random" else "d-psgd"
    made, values = gossip(channel, name, elements, method=method), own(channel.rank, elements)
    x, w = everyone(channel, values), np.ones(channel.size)
    for round in range(5):
        once(made, values)
        m = matrix(made.graph.edges(round), channel.size)
        x, w = m @ x, m @ w
        np.testing.assert_allclose(values, (x / w[:, None])[channel.rank], rtol=1e-13, atol=1e-13)
        assert made.weight == pytest.approx(w[channel.rank], rel=1e-14)


def test_one_peer_exponential_gives_all_the_mean_after_log2_rounds(channel):
    made, values = gossip(channel, "one_peer_exponential", 5000, "float32"), own(channel.rank, 5000, "float32")
    mean = everyone(channel, values).mean(0)
    for _ in range(math.ceil(math.log2(max(channel.size, 1)))):
        once(made, values)
    if math.log2(channel.size) % 1 == 0:
        np.testing.assert_allclose(values, mean, atol=1e-6)


def test_push_sum_keeps_the_sums_of_weights_and_of_values_over_a_thousand_rounds(channel):
    made, values = gossip(channel, "random", 7, method="push-sum"), own(channel.rank, 7)
    before = everyone(channel, values).sum(0)
    for _ in range(1000):
        once(made, values)
    sums = everyone(channel, np.append(made.weight * values, made.weight)).sum(0)
    np.testing.assert_allclose(sums[:-1], before, rtol=1e-12, atol=1e-12)
    assert sums[-1] == pytest.approx(channel.size, rel=1e-12)
    np.testing.assert_allclose(values, before / channel.size, rtol=1e-9, atol=1e-9)       # and all have come to agree


def test_push_sum_in_float32_carries_its_scalar_in_full(channel):
    made, values = gossip(channel, "random", 3, "float32", "push-sum"), own(channel.rank, 3, "float32")
    for _ in range(40):
        once(made, values)
    assert everyone(channel, np.array([made.weight])).sum() == pytest.approx(channel.size, rel=1e-14)


def test_the_order_of_other_messages_does_not_matter(channel):
    made, values = gossip(channel, "ring", 100), own(channel.rank, 100)
    made.outgoing[...] = values
    made.start()
    other = np.ones(3)
    channel.allreduce(other, name="loss")                      # a step's own messages are in between
    values[...] = made.finish()
    assert (other == channel.size).all()
    x = everyone(channel, own(channel.rank, 100))
    np.testing.assert_allclose(values, (matrix(made.graph.edges(0), channel.size) @ x)[channel.rank], rtol=1e-13, atol=1e-13)


class Points(nn.Module):
    def __init__(self):
        self.moves, self.stays = nn.Parameter((3, 2), zeros), nn.Parameter((2,), zeros)
        self.stays.trained_from = math.inf


def site_of(mesh, rank):
    """What a level asks of a policy whose loss is |x - rank|^2 / 2."""
    storage = Points().initialize(seed=0, dtype="float64")
    for s in storage.segments:
        storage.values[s.start:s.stop] = own(rank, s.stop - s.start)
    return SimpleNamespace(mesh=mesh, storage=storage, stage=SimpleNamespace(chunks=[]), settle=lambda: None, want_norm=True,
                           context=SimpleNamespace(control=mesh.channel(mesh.axes, "control")))


@pytest.mark.parametrize("name, every", [("ring", 1), ("one_peer_exponential", 2), ("random", 1), ("random", 3)])
def test_steps_between_rounds_are_those_of_the_papers(comm, name, every):
    """D-PSGD and push-sum in NumPy, for all workers at once, on quadratic losses."""
    mesh, n, rate = Mesh(comm, site=comm.size, dp=1), comm.size, 0.1
    policy, proved = site_of(mesh, comm.rank), check_graph(getattr(graphs, name), n, method="push-sum" if name == "random" else
                                                           "d-psgd", name=name)
    level = Neighbours(policy, proved, every=every)
    moves, stays = (policy.storage.values[s.start:s.stop] for s in policy.storage.segments)
    x, w = np.stack([own(rank, 6) for rank in range(n)]), np.ones((n, 1))
    still = stays.copy()
    for step in range(10):
        gradient = x / w - np.arange(n)[:, None]
        if step and step % every == 0:
            m = matrix(proved.edges(step // every - 1), n)
            x, w = m @ x, m @ w
        x = x - rate * gradient

        level.begin(step)
        mine = moves - comm.rank
        assert level.mix(None)
        moves -= rate * level.rate_factor * mine
        level.end(step + 1, rate)
        np.testing.assert_allclose(moves, (x / w)[comm.rank], rtol=1e-12, atol=1e-12)
        found = x / w
        assert level.fields["drift"] == pytest.approx(math.sqrt(((found - found.mean(0)) ** 2).sum() / n
                                                                / (found.mean(0) ** 2).sum()), rel=1e-9)
        assert level.fields["round"] == step // every
    np.testing.assert_array_equal(stays, still)                # what is not trained does not travel
    flat = policy.storage.values.copy()
    level.mean_of(flat)
    np.testing.assert_allclose(flat[policy.storage.segments[0].start:policy.storage.segments[0].stop], x.mean(0), rtol=1e-12)

    level.wait()
    again = Neighbours(policy, proved, every=every)
    assert again.resume(10, True, {}) == ""
    again.take_numbers(level.numbers())
    assert (again.gossip.round, again.gossip.weight) == (level.gossip.round, level.gossip.weight)
    mesh.close()
