"""Update rules against torch.optim in float64, and against the papers' formulas where PyTorch has none."""

import math

import numpy as np
import pytest
from optimizer_state import set_state, state_of

from mpitrain import nn, ops, optim
from mpitrain.arguments import accepted
from mpitrain.errors import ConfigError, GraphError, NumericsError, ShapeError
from mpitrain.nn import Linear, Module, Parameter, Segment, Sequential, init
from mpitrain.optim import LAMB, LARS, OPTIMIZERS, SGD, Adam, AdamW, Optimizer, RMSprop

SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (2, 5), "b.gain": (), "c": (3, 2, 2)}
STEPS = 20
RULES = sorted(set(OPTIMIZERS) - {"lbfgs"})     # that change parameters by one gradient


def made(name, model, **arguments):
    """The optimizer, with those arguments that it takes: Rprop has no weight decay."""
    return OPTIMIZERS[name](model, **accepted(OPTIMIZERS[name], arguments))



class Bag(Module):
    """Parameters of several shapes."""

    def __init__(self, shapes=SHAPES):
        for name, shape in shapes.items():
            setattr(self, name, Parameter(shape, init.normal(1.0)))


def bag(dtype="float64", shapes=SHAPES):
    model = Bag(shapes)
    model.initialize(seed=3, dtype=dtype)
    return model


def gradient(storage, step):
    """A flat gradient, with nonsense in the gaps."""
    flat = np.full(storage.size, 7.0, storage.dtype)
    for i, view in enumerate(storage.views(flat)):
        view[...] = np.random.default_rng(100 * step + i).standard_normal(view.shape)
    return flat


def torch_cases():
    torch = pytest.importorskip("torch").optim
    return {
        "sgd": (lambda m: SGD(m, 0.1), lambda p: torch.SGD(p, 0.1)),
        "sgd decay": (lambda m: SGD(m, 0.1, weight_decay=0.2), lambda p: torch.SGD(p, 0.1, weight_decay=0.2)),
        "momentum": (lambda m: SGD(m, 0.1, momentum=0.9, weight_decay=0.2),
                     lambda p: torch.SGD(p, 0.1, momentum=0.9, weight_decay=0.2)),
        "nesterov": (lambda m: SGD(m, 0.1, momentum=0.8, nesterov=True, weight_decay=0.2),
                     lambda p: torch.SGD(p, 0.1, momentum=0.8, nesterov=True, weight_decay=0.2)),
        "adam": (lambda m: Adam(m), lambda p: torch.Adam(p)),
        "adam L2": (lambda m: Adam(m, 0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3),
                    lambda p: torch.Adam(p, 0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)),
        "adamw": (lambda m: AdamW(m), lambda p: torch.AdamW(p)),
        "adamw more": (lambda m: AdamW(m, 0.02, betas=(0.9, 0.99), weight_decay=0.3),
                       lambda p: torch.AdamW(p, 0.02, betas=(0.9, 0.99), weight_decay=0.3)),
        "rmsprop": (lambda m: RMSprop(m), lambda p: torch.RMSprop(p)),
        "rmsprop momentum": (lambda m: RMSprop(m, 0.02, alpha=0.9, momentum=0.7, weight_decay=0.1),
                             lambda p: torch.RMSprop(p, 0.02, alpha=0.9, momentum=0.7, weight_decay=0.1)),
    }


@pytest.mark.parametrize("case", ["sgd", "sgd decay", "momentum", "nesterov", "adam", "adam L2", "adamw", "adamw more",
                                  "rmsprop", "rmsprop momentum"])
def test_twenty_steps_are_those_of_pytorch(case):
    torch = pytest.importorskip("torch")
    ours, theirs = torch_cases()[case]
    model = bag()
    reference = [torch.nn.Parameter(torch.tensor(p.array.copy())) for p in model.parameters()]
    optimizer, torch_optimizer = ours(model), theirs(reference)
    for step in range(1, STEPS + 1):
        flat = gradient(model.storage, step)
        rate = torch_optimizer.param_groups[0]["lr"] = optimizer.lr * (1 - step / 40)
        for p, view in zip(reference, model.storage.views(flat)):
            p.grad = torch.tensor(0.5 * view)
        optimizer.update(flat, lr=rate, step=step, scale=0.5)
        torch_optimizer.step()
    for p, expected in zip(model.parameters(), reference):
        np.testing.assert_allclose(p.array, expected.detach().numpy(), rtol=0, atol=1e-10)


def test_lars_follows_its_paper():
    model = bag()
    optimizer = LARS(model, 0.1, momentum=0.9, trust=0.01, weight_decay=0.05)
    w = {name: p.array.copy() for name, p in model.named_parameters()}
    v = {name: np.zeros_like(value) for name, value in w.items()}
    for step in range(1, STEPS + 1):
        flat = gradient(model.storage, step)
        optimizer.update(flat, lr=0.1, step=step, scale=0.5)
        for name, view in zip(w, model.storage.views(flat)):
            g, matrix = 0.5 * view, w[name].ndim >= 2
            decay = 0.05 if matrix else 0.0
            local = 0.01 * np.linalg.norm(w[name]) / (np.linalg.norm(g) + decay * np.linalg.norm(w[name])) if matrix else 1.0
            v[name] = 0.9 * v[name] + 0.1 * local * (g + decay * w[name])
            w[name] = w[name] - v[name]
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.array, w[name], rtol=0, atol=1e-10)


def test_lamb_follows_its_paper():
    model = bag()
    optimizer = LAMB(model, 0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    w = {name: p.array.copy() for name, p in model.named_parameters()}
    m, v = ({name: np.zeros_like(value) for name, value in w.items()} for _ in range(2))
    for step in range(1, STEPS + 1):
        flat = gradient(model.storage, step)
        optimizer.update(flat, lr=0.01, step=step, scale=0.5)
        for name, view in zip(w, model.storage.views(flat)):
            g, matrix = 0.5 * view, w[name].ndim >= 2
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.99 * v[name] + 0.01 * g * g
            r = m[name] / (1 - 0.9**step) / (np.sqrt(v[name] / (1 - 0.99**step)) + 1e-6) + (0.1 * w[name] if matrix else 0)
            ratio = np.linalg.norm(w[name]) / np.linalg.norm(r) if matrix else 1.0
            w[name] = w[name] - 0.01 * ratio * r
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.array, w[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_layer_wise_rates_survive_weights_and_gradients_of_zero(name):
    model = bag("float32")
    model.storage.values[...] = 0
    optimizer = OPTIMIZERS[name](model, lr=0.1)
    optimizer.update(model.storage.new_flat(), lr=0.1, step=1)
    assert (model.storage.values == 0).all()
    optimizer.update(gradient(model.storage, 1), lr=0.1, step=2)
    assert np.isfinite(model.storage.values).all() and (model.parameters()[0].array != 0).any()


@pytest.mark.parametrize("name", RULES)
def test_every_optimizer_trains_in_float32_and_leaves_the_gradients_alone(name):
    model = bag("float32")
    before = model.storage.values.copy()
    optimizer = made(name, model, lr=0.01, weight_decay=0.1)
    flat = gradient(model.storage, 1)
    kept = flat.copy()
    optimizer.update(flat, lr=0.01, step=1)
    np.testing.assert_array_equal(flat, kept)
    assert all((p.array != b).all() for p, b in zip(model.parameters(), model.storage.views(before)))
    assert all(flat.dtype == np.float32 for flat in optimizer.state.values())


@pytest.mark.parametrize("name", RULES)
def test_a_frozen_parameter_stays_as_it_is_until_it_is_no_more(name):
    """Weight decay, and moments from before, must not move it: PyTorch leaves parameters without a gradient alone."""
    model = bag("float32")
    optimizer, flat = made(name, model, lr=0.01, weight_decay=0.1), gradient(model.storage, 1)
    frozen = list(model.parameters())[1]
    for step, kept in ((1, False), (2, True), (3, True), (4, False)):
        frozen.requires_grad = not kept
        before = [p.array.copy() for p in model.parameters()]
        optimizer.update(flat, lr=0.01, step=step)
        for p, was in zip(model.parameters(), before, strict=True):
            assert (p.array == was).all() == (kept and p is frozen), (p.name, step)


@pytest.mark.parametrize(("decay", "decayed"), [("all", {"a.weight", "a.bias", "b.weight", "b.gain"}),
                                                ("matrices", {"a.weight", "b.weight"})])
def test_weight_decay_is_for_all_or_for_matrices_and_never_where_the_parameter_declines(decay, decayed):
    model = Bag()
    model.c.decay = False
    model.initialize(dtype="float64")
    before = {name: value.copy() for name, value in model.state_dict().items()}
    optimizer = AdamW(model, 0.1, weight_decay=0.5, decay=decay)
    optimizer.update(model.storage.new_flat(), lr=0.1, step=1)
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.array, before[name] * (0.95 if name in decayed else 1.0), rtol=1e-12)


def test_neighbours_that_are_updated_alike_are_one_run():
    model = bag()
    seen = []

    class Spy(Optimizer):
        def change(self, run, gradients, lr, step, scale):
            seen.append((run.start, run.stop, run.decay, len(gradients)))
    flat = model.storage.new_flat()
    Spy(model, 0.1, weight_decay=0.5).update(flat, lr=0.1, step=1)
    assert seen == [(0, 76, 0.5, 76)]
    seen.clear()
    spy = Spy(model, 0.1, weight_decay=0.5, decay="matrices")
    spy.update(flat, lr=0.1, step=1)
    assert seen == [(0, 15, 0.5, 15), (16, 21, 0.0, 5), (32, 42, 0.5, 10), (48, 49, 0.0, 1), (64, 76, 0.5, 12)]
    seen.clear()
    a, bias, *_ = model.storage.segments
    spy = Spy(model, 0.1, weight_decay=0.5)
    spy.update(flat, lr=0.1, step=1, segments=[Segment(a.parameter, a.name, 4, 10, True), bias])
    assert seen == [(4, 10, 0.5, 6), (16, 21, 0.5, 5)]         # the rest of a, between them, is not ours to update


def test_parts_updated_one_by_one_equal_the_whole():
    whole, parts = bag(), bag()
    flat = gradient(whole.storage, 1)
    AdamW(whole, 0.1).update(flat, lr=0.1, step=1)
    optimizer = AdamW(parts, 0.1)
    for lo, hi in ((0, 10), (10, 35), (35, 80)):
        cut = [Segment(s.parameter, s.name, max(lo, s.start), min(hi, s.stop), s.decay) for s in parts.storage.segments
               if s.start < hi and s.stop > lo]
        optimizer.update(flat, lr=0.1, step=1, segments=cut)
    for mine, expected in zip(parts.parameters(), whole.parameters()):
        np.testing.assert_array_equal(mine.array, expected.array)


def test_an_optimizer_that_needs_norms_refuses_parts():
    model = bag()
    a = model.storage.segments[0]
    with pytest.raises(ShapeError, match='LAMB needs whole parameters, got elements 4:10 of "a.weight"'):
        LAMB(model).update(model.storage.new_flat(), lr=0.1, step=1, segments=[Segment(a.parameter, a.name, 4, 10, True)])


def linear():
    model = Sequential(("a", Linear(3, 4)), ("b", Linear(4, 1)))
    model.initialize(dtype="float64")
    return model


def test_a_plain_loop_equals_updates_from_flat_gradients():
    x, y = np.random.default_rng(0).standard_normal((2, 8, 3))
    y = y[:, :1]
    plain, flat = linear(), linear()
    one, two = SGD(plain, 0.01, momentum=0.9), SGD(flat, 0.01, momentum=0.9)
    arena = flat.storage.attach_gradients()
    for step in range(1, 4):
        for model in (plain, flat):
            ops.mse(model(x), y).backward()
        one.step()
        one.zero_grad()
        two.update(arena, lr=0.01, step=step)
        for p in flat.parameters():
            p.grad = None
    np.testing.assert_array_equal(plain.storage.values, flat.storage.values)


def test_a_step_leaves_parameters_without_gradient_alone():
    model = linear()
    optimizer = AdamW(model, 0.1, weight_decay=0.5)
    before = model.storage.values.copy()
    model["a"](np.ones((1, 3))).backward(np.ones((1, 4)))
    optimizer.step()
    changed = [(p.array != old).any() for p, old in zip(model.parameters(), model.storage.views(before))]
    assert changed == [True, True, False, False]


def test_an_update_is_seen_by_a_backward_that_still_needs_the_old_values():
    model = linear()
    loss = ops.sum(model(np.ones((1, 3))))
    SGD(model, 0.1).update(model.storage.new_flat(), lr=0.1, step=1)
    with pytest.raises(GraphError, match="changed in place"):
        loss.backward()


@pytest.mark.parametrize("name", RULES)
def test_state_by_parameter_name_continues_to_the_same_bits(name):
    one, two = bag("float32"), bag("float32")
    first, second = (OPTIMIZERS[name](m, lr=0.01) for m in (one, two))
    for step in (1, 2):
        first.update(gradient(one.storage, step), lr=0.01, step=step)
    two.load_state_dict(one.state_dict())
    state = {key: value.copy() for key, value in state_of(first).items()}
    set_state(second, state)
    assert second.steps == 2
    for optimizer, model in ((first, one), (second, two)):
        optimizer.update(gradient(model.storage, 3), lr=0.01, step=3)
    for mine, expected in zip(two.parameters(), one.parameters()):
        np.testing.assert_array_equal(mine.array, expected.array)


@pytest.mark.parametrize(("make", "message"), [
    (lambda m: SGD(m, -1.0), "optimizer.lr is a number >= 0, not -1.0"),
    (lambda m: SGD(m, math.nan), "optimizer.lr is a number >= 0, not nan"),
    (lambda m: SGD(m, 0.1, momentum=1.0), r"optimizer.momentum is in \[0, 1\), not 1.0"),
    (lambda m: SGD(m, 0.1, nesterov=True), "optimizer.momentum is more than 0 with nesterov, not 0.0"),
    (lambda m: SGD(m, 0.1, weight_decay=-0.1), "optimizer.weight_decay is a number >= 0, not -0.1"),
    (lambda m: SGD(m, 0.1, decay="some"), 'decay is "all" or "matrices", not "some"'),
    (lambda m: Adam(m, betas=(0.9, 1.0)), r"optimizer.betas is two numbers in \[0, 1\), not \[0.9, 1.0\]"),
    (lambda m: AdamW(m, betas=(0.9,)), r"optimizer.betas is two numbers in \[0, 1\), not \[0.9\]"),
    (lambda m: LAMB(m, eps=0.0), "optimizer.eps is more than 0, not 0.0"),
    (lambda m: RMSprop(m, eps=0.0), "optimizer.eps is more than 0, not 0.0"),
    (lambda m: RMSprop(m, alpha=1.0), r"optimizer.alpha is in \[0, 1\), not 1.0"),
    (lambda m: RMSprop(m, momentum=-0.5), r"optimizer.momentum is in \[0, 1\), not -0.5"),
    (lambda m: LARS(m, momentum=2.0), r"optimizer.momentum is in \[0, 1\), not 2.0"),
    (lambda m: LARS(m, trust=0.0), "optimizer.trust is more than 0, not 0.0")])
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make(linear())


def test_gradients_of_another_layout_and_a_model_without_memory_are_refused():
    with pytest.raises(GraphError, match=r"call initialize\(\) on the model first"):
        SGD(Bag(), 0.1)
    with pytest.raises(ShapeError, match=r"flat array of shape \(80,\), got \(3,\)"):
        SGD(bag(), 0.1).update(np.zeros(3), lr=0.1, step=1)
    with pytest.raises(GraphError, match="Optimizer defines neither a kernel nor change"):
        Optimizer(bag(), 0.1).update(np.zeros(80), lr=0.1, step=1)


@pytest.mark.parametrize("lr", [1e3, 40.0])
def test_the_line_search_goes_back_from_where_the_loss_is_infinite(lr):
    """exp(w^2) + w overflows far out; PyTorch's parameters are NaN then. At the minimum 2 w exp(w^2) = -1."""
    model = nn.Sequential(("w", nn.Linear(3, 1, bias=False)))
    model.initialize(dtype="float64")
    w = model["w"].weight
    w.array[...] = [[1.0, -0.5, 0.3]]
    optimizer = optim.LBFGS(model.parameters(), lr=lr, line_search_fn="strong_wolfe", max_iter=40, max_eval=300)
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = (ops.exp(w ** 2.0) + w).sum()
        loss.backward()
        seen.append(float(loss.array))
        return loss
    with np.errstate(all="ignore"):
        optimizer.step(closure)
    assert np.inf in seen
    np.testing.assert_allclose(2 * w.array * np.exp(w.array ** 2), -1, rtol=1e-5)


@pytest.mark.parametrize("search", ["strong_wolfe", None])
def test_a_loss_that_is_no_number_is_left_by_the_line_search_and_named_without_one(search):
    model = nn.Sequential(("w", nn.Linear(2, 1, bias=False)))
    model.initialize(dtype="float64")
    w = model["w"].weight
    w.array[...] = 0.1
    optimizer = optim.LBFGS(model, lr=30.0, line_search_fn=search, max_iter=40, max_eval=300)

    def closure():
        optimizer.zero_grad()
        loss = (w * 0.3 - ops.log(6.0 - w) - ops.log(w)).sum()         # defined in (0, 6) alone
        loss.backward()
        return loss
    with np.errstate(all="ignore"):
        if search:
            optimizer.step(closure)
            np.testing.assert_allclose(0.3 + 1 / (6 - w.array) - 1 / w.array, 0, atol=1e-5)
        else:
            with pytest.raises(NumericsError, match="the loss is nan after move 1 of the step"):
                optimizer.step(closure)


def test_lbfgs_takes_all_parameters_of_a_model_or_says_so():
    model = nn.Sequential(nn.Linear(2, 2))
    model.initialize()
    for given in (model.parameters(), [{"params": model.parameters()}]):
        assert optim.LBFGS(given).storage is model.storage
    for given in (model.parameters()[:1], [{"params": model.parameters(), "lr": 1.0}], [], nn.Linear(2, 2).parameters()):
        with pytest.raises(ConfigError, match="LBFGS has one rule for all parameters of one model with memory, and this is"):
            optim.LBFGS(given)
