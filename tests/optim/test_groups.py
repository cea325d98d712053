"""Groups of parameters against PyTorch's, in plain loops; what a run does with them is in tests/train."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError, GraphError
from mpitrain.optim import SGD, Adam, AdamW, Lion, Rprop

X, Y = np.random.default_rng(0).standard_normal((2, 12, 5))


def model() -> nn.Sequential:
    made = nn.Sequential(("first", nn.Linear(5, 7)), ("second", nn.Linear(7, 6)), ("head", nn.Linear(6, 5)))
    made.initialize(seed=1, dtype="float64")
    return made


def train(net: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        d = net(Tensor(X)) - Y
        ops.sum(d * d).backward()
        optimizer.step()


def parts(net: Any, name: str) -> list[Any]:
    return [p for key, p in net.named_parameters() if key.startswith(name)]


def test_groups_step_as_pytorchs_with_rates_decay_and_keys_of_their_own() -> None:
    torch = pytest.importorskip("torch")
    net = model()
    twin = {name: torch.nn.Parameter(torch.tensor(p.numpy().copy())) for name, p in net.named_parameters()}

    def of(name: str) -> list[Any]:
        return [p for key, p in twin.items() if key.startswith(name)]
    keys = ({"lr": 0.02}, {"weight_decay": 0.3, "betas": (0.8, 0.9)}, {"lr": 0.001, "eps": 1e-3})
    mine = AdamW([{"params": parts(net, name), **more} for name, more in zip(("first", "second", "head"), keys)], lr=0.01)
    other = torch.optim.AdamW([{"params": of(name), **more} for name, more in zip(("first", "second", "head"), keys)], lr=0.01)
    for _ in range(15):
        train(net, mine, 1)
        other.zero_grad()
        x = torch.tensor(X)
        for layer in ("first", "second", "head"):
            x = x @ twin[f"{layer}.weight"].T + twin[f"{layer}.bias"]
        (x - torch.tensor(Y)).square().sum().backward()
        other.step()
    for name, p in net.named_parameters():
        np.testing.assert_allclose(p.numpy(), twin[name].detach().numpy(), rtol=1e-10, atol=1e-12)


def test_the_steps_of_rprop_begin_at_the_rate_of_the_group() -> None:
    torch = pytest.importorskip("torch")
    net = model()
    first, head = (p.numpy().copy() for p in (parts(net, "first.weight")[0], parts(net, "head.weight")[0]))
    optimizer: Any = Rprop([{"params": parts(net, "first"), "lr": 0.5}, {"params": "head.*"}], lr=0.01)
    arena = net.storage.attach_gradients()
    arena[...] = np.linspace(-1, 1, arena.size)
    optimizer.update(arena, lr=0.01, step=1)
    for name, before, lr in (("first.weight", first, 0.5), ("head.weight", head, 0.01)):
        mine, = parts(net, name)
        other = torch.nn.Parameter(torch.tensor(before))
        theirs = torch.optim.Rprop([{"params": [other], "lr": lr}])
        other.grad = torch.tensor(mine.grad_buffer)
        theirs.step()
        np.testing.assert_allclose(mine.numpy(), other.detach().numpy(), rtol=1e-12)


@pytest.mark.parametrize(("groups", "message"), [
    ([{"params": "head.*"}, {"params": "first.*"}], r"patterns alone \('head.\*', 'first.\*'\), which name no model"),
    ([], "the groups of an optimizer have no parameters"), ([{"params": []}], "the groups of an optimizer have no parameters")])
def test_groups_that_name_no_model_say_so(groups: Any, message: str) -> None:
    net = model()
    with pytest.raises(ConfigError, match=message):
        AdamW(groups, lr=1e-4)
    assert net.storage is not None


def test_one_group_of_everything_has_the_bits_of_none() -> None:
    one, two = model(), model()
    train(one, Adam(one, 0.01, weight_decay=0.1), 5)
    train(two, Adam(two.parameters(), 0.01, weight_decay=0.1), 5)
    assert all((p.array == q.array).all() for p, q in zip(one.parameters(), two.parameters()))


def test_a_frozen_group_has_no_gradient_no_state_and_no_change() -> None:
    net = model()
    before = [p.numpy().copy() for p in parts(net, "first")]
    optimizer: Any = AdamW([{"params": "first.*", "frozen": True}, {"params": parts(net, "second")}], lr=0.1, weight_decay=0.5)
    train(net, optimizer, 3)
    assert all(p.grad is None and (p.numpy() == old).all() for p, old in zip(parts(net, "first"), before))
    assert sum(flat.size for flat in optimizer.state.values()) <= 2 * (6 * 7 + 6 + 32)
    assert not any(one.among("first.weight") for one in optimizer.held())
    assert all(p.grad is not None for p in parts(net, "head"))        # in no group: left alone, with its gradient


def test_a_group_is_thawed_at_its_step_and_counts_from_there() -> None:
    net, twin = model(), model()
    train(net, Adam([{"params": "first.*", "freeze_until": 4}, {"params": [*parts(net, "second"), "head.*"]}], lr=0.05), 9)
    late = parts(twin, "first")
    for p in late:
        p.requires_grad = False
    rest = Adam([*parts(twin, "second"), *parts(twin, "head")], lr=0.05)
    train(twin, rest, 4)
    for p in late:
        p.requires_grad = True
    both = Adam(late, lr=0.05)
    for _ in range(5):
        for p in twin.parameters():
            p.zero_grad()
        d = twin(Tensor(X)) - Y
        ops.sum(d * d).backward()
        rest.step()
        both.step()
    for p, q in zip(net.parameters(), twin.parameters()):
        np.testing.assert_array_equal(p.numpy(), q.numpy())


def test_mistakes_are_named_in_one_line() -> None:
    net = model()
    for groups, words in (([{"params": "hed.*"}], 'params = "hed.*" names no parameter'),
                          ([{"params": "head.*", "momentum": 0.9}], "a group has no key momentum"),
                          ([{"lr": 0.1}, {"params": "head.*"}], "needs params"),
                          ([{"params": "head.*", "lr": 0.1, "lr_factor": 2}], "give one rate"),
                          ([{"params": "head.*", "freeze_until": -1}], "freeze_until is a number of steps"),
                          ([{"params": "head.*"}, {"params": "head.weight"}], "the group of head.weight has no parameter")):
        with pytest.raises(ConfigError, match=words.replace("*", r"\*")):
            Adam([*groups, {"params": parts(net, "first")}], lr=0.01)
    with pytest.raises(GraphError, match="parameters of one model with memory"):
        Lion(nn.Linear(2, 2).parameters())
    with pytest.raises(ConfigError, match="every group is frozen"):
        Adam([{"params": "head.*", "frozen": True}, {"params": parts(net, "first"), "frozen": True}])
    with pytest.raises(ConfigError, match="momentum"):
        SGD([{"params": net.parameters(), "momentum": 1.5}], 0.1)
