"""The 1-bit optimizers with n workers in one process, against the papers' formulas in float64, and against AdamW and LAMB."""

import numpy as np
import pytest

from mpitrain.errors import ConfigError
from mpitrain.nn import Module, Parameter, init
from mpitrain.optim import LAMB, OPTIMIZERS, AdamW
from mpitrain.optim.one_bit import DENSE, LOCAL, PACKED
from mpitrain.optim.zero_one import renewals, round_ends

SHAPES = {"a.weight": (60, 40), "a.bias": (40,), "b.weight": (7, 5)}
NEVER = slice(30, 35)                        # elements of b.weight that never have a gradient: no sign can say so
N, STEPS, FREEZE = 3, 30, 10
LR = 0.01


class Bag(Module):
    """Parameters of several shapes."""

    def __init__(self):
        for name, shape in SHAPES.items():
            setattr(self, name, Parameter(shape, init.normal(1.0)))


def made(kind, **keys):
    model = Bag()
    model.initialize(seed=3, dtype="float32")
    optimizer = kind(model, LR, **keys)
    return model, optimizer


def gradient(storage, step, worker):
    """A worker's part of the gradient: a direction that all have, and noise; nothing in the elements NEVER."""
    flat = np.zeros(storage.size, np.float32)
    for i, (segment, view) in enumerate(zip(storage.segments, storage.views(flat))):
        steady = np.random.default_rng(i).standard_normal(view.shape)
        view[...] = (steady + np.random.default_rng([step, worker, i]).standard_normal(view.shape)) / N
        if segment.name == "b.weight":
            view.reshape(-1)[NEVER] = 0
        view.reshape(-1)[:3] *= np.float32(0.01)              # Their variance lies below the floor.
    return flat


class Signs:
    """Signs and one scale, the mean size, for each worker's message, with feedback; masked elements send and keep 0."""

    def __init__(self):
        self.errors = [0.0] * N

    def __call__(self, messages, never):
        total = np.zeros_like(messages[0])
        for k, message in enumerate(messages):
            wanted = np.where(never, 0, message + self.errors[k])
            sent = np.where(never, 0, np.abs(wanted[~never]).mean() * np.where(wanted < 0, -1, 1)).astype(np.float32)
            self.errors[k] = wanted - sent
            total += sent
        return total


class Forgets(Signs):
    """The same without feedback."""

    def __call__(self, messages, never):
        self.errors = [0.0] * N
        return super().__call__(messages, never)


def exact(messages, never):
    """The sum without any rounding."""
    return np.where(never, 0, np.sum(messages, axis=0, dtype=np.float64)).astype(np.float32)


def train(kind, exchange, steps=STEPS, rate=lambda step: LR, **keys):
    """n workers, each with an optimizer of its own; (their parameters after each step, the optimizers)."""
    workers = [made(kind, **keys) for _ in range(N)]
    for _, optimizer in workers:
        optimizer.planned(steps, N)
    after = []
    for step in range(1, steps + 1):
        gradients = [gradient(model.storage, step, k) for k, (model, _) in enumerate(workers)]
        first = workers[0][1]
        if first.exchange(step) == DENSE:
            gradients = [np.sum(gradients, axis=0, dtype=np.float64).astype(np.float32)] * N
        elif first.exchange(step) == PACKED:
            for flat, (_, optimizer) in zip(gradients, workers):
                optimizer.put(flat, 0, step, rate(step))
            gradients = [exchange(gradients, first.never(0, first.storage.size))] * N
        for flat, (_, optimizer) in zip(gradients, workers):
            optimizer.update(flat, lr=rate(step), step=step)
        after.append([model.storage.values.copy() for model, _ in workers])
    return after, [optimizer for _, optimizer in workers]


@pytest.mark.parametrize(("ours", "plain"), [("onebit_adam", AdamW), ("onebit_lamb", LAMB)])
def test_before_the_freeze_they_are_adamw_and_lamb_to_the_bit(ours, plain):
    after, _ = train(OPTIMIZERS[ours], exact, freeze=FREEZE)
    model, optimizer = made(plain)
    for step in range(1, FREEZE + 1):
        flat = np.sum([gradient(model.storage, step, k) for k in range(N)], axis=0, dtype=np.float64).astype(np.float32)
        optimizer.update(flat, lr=LR, step=step)
        assert all(np.array_equal(one, model.storage.values) for one in after[step - 1])


def test_onebit_adam_is_the_formula_of_the_paper():
    """With an exchange that rounds nothing: momentum over the v of the freeze, in float64."""
    after, _ = train(OPTIMIZERS["onebit_adam"], exact, freeze=FREEZE, weight_decay=0.1)
    model, _ = made(AdamW)
    w = model.storage.values.astype(np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    floors = np.zeros_like(w)
    for step in range(1, STEPS + 1):
        g = np.sum([gradient(model.storage, step, k) for k in range(N)], axis=0, dtype=np.float64)
        m = 0.9 * m + 0.1 * g
        if step <= FREEZE:
            v, floors = 0.999 * v + 0.001 * g * g, np.zeros_like(w)
        if step == FREEZE:
            for s in model.storage.segments:
                part = v[s.start:s.stop]
                floors[s.start:s.stop] = 0.01 * part[part > 0].mean()
        used = np.maximum(v, floors) if step > FREEZE else v
        w = (1 - LR * 0.1) * w - LR / (1 - 0.9 ** step) * m / (np.sqrt(used / (1 - 0.999 ** min(step, FREEZE))) + 1e-8)
    w[np.setdiff1d(np.arange(w.size), np.concatenate([np.arange(s.start, s.stop) for s in model.storage.segments]))] = 0
    np.testing.assert_allclose(after[-1][0], w, rtol=2e-4, atol=2e-5)
    assert (floors > v)[v > 0].any()                          # The floor has a part in it.


def test_all_workers_have_the_same_bits_and_signs_with_feedback_go_the_way_of_the_exact_exchange():
    for name in ("onebit_adam", "onebit_lamb", "zeroone_adam"):
        keys = {"local_steps": 1} if name == "zeroone_adam" else {}
        packed, _ = train(OPTIMIZERS[name], Signs(), steps=120, freeze=40, **keys)
        plain, _ = train(OPTIMIZERS[name], exact, steps=120, freeze=40, **keys)
        assert all(np.array_equal(packed[-1][0], other) for other in packed[-1])
        moved = np.linalg.norm(plain[-1][0] - plain[39][0])
        assert moved > 0.5
        assert np.linalg.norm(packed[-1][0] - plain[-1][0]) < 0.35 * moved
        forgot, _ = train(OPTIMIZERS[name], Forgets(), steps=120, freeze=40, **keys)
        assert np.linalg.norm(forgot[-1][0] - plain[-1][0]) > 1.5 * np.linalg.norm(packed[-1][0] - plain[-1][0])


def test_elements_without_a_gradient_stay_where_they_are():
    after, optimizers = train(OPTIMIZERS["onebit_adam"], Signs(), freeze=FREEZE, weight_decay=0.0)
    segment = next(s for s in optimizers[0].storage.segments if s.name == "b.weight")
    own = slice(segment.start + NEVER.start, segment.start + NEVER.stop)
    assert np.array_equal(after[0][0][own], after[-1][0][own])
    assert not optimizers[0].state["m"][own].any()


def test_an_element_with_next_to_no_variance_needs_the_floor():
    """One whose gradient was 1e-12 in the warm-up moves by no more than others with the floor, and far away without."""
    moved = {}
    for floor in (0.01, 0.0):
        model, optimizer = made(OPTIMIZERS["onebit_adam"], freeze=2, v_floor=floor)
        optimizer.planned(10, 1)
        start = model.storage.segments[0].start
        for step in range(1, 4):
            flat = gradient(model.storage, step, 0)
            flat[start] = 1e-12
            if step == 3:
                flat[:] = 0.1                                 # What arrives at 1 bit has one size for all.
                before = model.storage.values[start]
            optimizer.update(flat, lr=LR, step=step)
        moved[floor] = abs(model.storage.values[start] - before)
    assert moved[0.01] < 1.0 < 1e3 < moved[0.0]


def lamb_reference(model):
    """1-bit LAMB in float64, parameter by parameter, after Li et al., 2021, with an exchange that rounds nothing."""
    found = []
    for s in model.storage.segments:
        w = model.storage.values[s.start:s.stop].astype(np.float64)
        m, v, c, factor = np.zeros_like(w), np.zeros_like(w), None, 1.0
        for step in range(1, STEPS + 1):
            g = np.sum([gradient(model.storage, step, k) for k in range(N)], axis=0, dtype=np.float64)[s.start:s.stop]
            m = 0.9 * m + 0.1 * g
            matrix = len(SHAPES[s.name]) > 1
            decay = 0.1 if matrix else 0.0
            if step <= FREEZE:
                v = 0.999 * v + 0.001 * g * g
                r = m / (1 - 0.9 ** step) / (np.sqrt(v / (1 - 0.999 ** step)) + 1e-6) + decay * w
                ratio = np.linalg.norm(w) / np.linalg.norm(r) if matrix else 1.0
                c, u = ratio if c is None else 0.9 * c + 0.1 * ratio, v
            else:
                low = 0.01 * v[v > 0].mean() / (1 - 0.999 ** FREEZE)
                root = np.sqrt(np.maximum(v / (1 - 0.999 ** FREEZE), low)) + 1e-6
                u = 0.999 * u + 0.001 * g * g
                now = np.sqrt(np.maximum(u / (1 - 0.999 ** step), low)) + 1e-6
                direction = m / (1 - 0.9 ** step) / root
                r = direction + decay * w
                share = min(1.0, np.linalg.norm(direction) / np.linalg.norm(r))
                wanted = min(max(share * np.max(root / now) + 1 - share, 0.5), 4.0)
                factor = min(max(wanted, 0.9 * factor), 1.1 * factor)
                ratio = c * factor if matrix else 1.0
            w = w - LR * ratio * r
        found.append((w, factor))
    return found


def test_onebit_lamb_is_the_formula_of_the_paper():
    after, optimizers = train(OPTIMIZERS["onebit_lamb"], exact, freeze=FREEZE, weight_decay=0.1)
    model, _ = made(LAMB)
    factors = set()
    for view, (w, factor), s in zip(model.storage.views(after[-1][0]), lamb_reference(model), model.storage.segments):
        np.testing.assert_allclose(view.reshape(-1), w, rtol=1e-3, atol=1e-4)
        if len(SHAPES[s.name]) > 1:
            factors.add(round(factor, 3))
            assert optimizers[0].ratios[optimizers[0]._two.places[s.start]][1] == pytest.approx(factor, rel=1e-3)
    assert factors - {1.0, 0.5, 4.0}                          # They follow the variance, and are not at a bound.


def zero_one_reference(model, rate, local_steps, local_every, every):
    """0/1 Adam in float64 after Lu et al., 2022, algorithm 1, worker by worker, with an exchange that rounds nothing."""
    start = model.storage.values.astype(np.float64)
    x, v = [start.copy() for _ in range(N)], np.zeros_like(start)
    m, u = [np.zeros_like(start) for _ in range(N)], [np.zeros_like(start) for _ in range(N)]
    dense, ends = renewals(FREEZE, every), round_ends(STEPS - FREEZE, local_steps, local_every)
    total, keep, count, begun = 0.0, 1.0, 0, x[0].copy()
    low = np.zeros_like(start)
    for step in range(1, STEPS + 1):
        g = [N * gradient(model.storage, step, k).astype(np.float64) for k in range(N)]
        m = [0.9 * mk + 0.1 * gk for mk, gk in zip(m, g)]
        gamma = rate(step) / (1 - 0.9 ** step)
        if step in dense:
            count, mean = count + 1, np.mean(g, axis=0)
            m, v = [np.mean(m, axis=0)] * N, 0.999 * v + 0.001 * mean * mean
            for s in model.storage.segments:
                part = v[s.start:s.stop]
                low[s.start:s.stop] = 0.01 * part[part > 0].mean()
            used = v if step == count else np.maximum(v, low)     # The floor is for a momentum that was at 1 bit.
            x = [(1 - rate(step) * 0.1) * x[0] - gamma * m[0] / (np.sqrt(used / (1 - 0.999 ** count)) + 1e-8)] * N
            begun = x[0].copy()
            continue
        root = np.sqrt(np.maximum(v, low) / (1 - 0.999 ** count)) + 1e-8
        u, total, keep = [uk + gamma * mk for uk, mk in zip(u, m)], total + gamma, keep * (1 - rate(step) * 0.1)
        if step < FREEZE or step - FREEZE in ends:
            mean = np.mean(u, axis=0)
            m = [mean / total] * N if total else [np.mean(m, axis=0)] * N
            x = [keep * begun - mean / root] * N
            begun, u, total, keep = x[0].copy(), [np.zeros_like(start) for _ in range(N)], 0.0, 1.0
        else:
            x = [keep * begun - uk / root for uk in u]
    return x


@pytest.mark.parametrize("rate", [lambda step: LR, lambda step: LR * (1 - step / 40) * (step % 7 > 0)])
def test_zeroone_adam_is_the_algorithm_of_the_paper(rate):
    keys = {"freeze": FREEZE, "variance_every": 2, "local_steps": 4, "local_every": 4, "weight_decay": 0.1}
    after, optimizers = train(OPTIMIZERS["zeroone_adam"], exact, rate=rate, **keys)
    kinds = [optimizers[0].exchange(step) for step in range(1, STEPS + 1)]
    assert kinds.count(LOCAL) >= 8 and kinds.count(DENSE) == 5 and kinds[-1] == PACKED
    model, _ = made(AdamW)
    expected = zero_one_reference(model, rate, 4, 4, 2)
    inside = np.concatenate([np.arange(s.start, s.stop) for s in model.storage.segments])
    for ours, theirs in zip(after[-1], expected):
        np.testing.assert_allclose(ours[inside], theirs[inside], rtol=1e-3, atol=1e-4)
    drifted = [len({one.tobytes() for one in step}) for step in after]
    assert [count > 1 for count in drifted] == [kind == LOCAL for kind in kinds]
    assert [optimizers[0].drifts(step) for step in range(1, STEPS + 1)] == [kind == LOCAL for kind in kinds]


def test_intervals_grow_as_they_are_said_to():
    assert renewals(16, 2) == [1, 2, 4, 6, 10, 14, 16]
    assert renewals(1, 16) == [1] and renewals(5, 16) == [1, 2, 3, 4, 5]
    assert round_ends(20, 4, 4) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert round_ends(5, 1, 1) == [1, 2, 3, 4, 5]


def test_with_a_renewal_at_each_step_zeroone_adam_begins_as_adamw_to_the_bit():
    after, _ = train(OPTIMIZERS["zeroone_adam"], exact, freeze=FREEZE, variance_every=100)
    plain, _ = train(OPTIMIZERS["onebit_adam"], exact, freeze=FREEZE)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(after[:FREEZE], plain[:FREEZE]))


@pytest.mark.parametrize(("keys", "words"), [
    ({"freeze": 30}, "optimizer.freeze = 30 is step 30 of a run of 30"), ({"freeze": 0.001}, "is step 0 of a run of 30"),
    ({"freeze": 31}, "must come after the first and before the last")])
def test_a_freeze_that_never_comes_is_refused(keys, words):
    _, optimizer = made(OPTIMIZERS["onebit_adam"], **keys)
    with pytest.raises(ConfigError, match=words):
        optimizer.planned(30, N)


@pytest.mark.parametrize(("name", "key", "value"), [
    ("onebit_adam", "freeze", 0.0), ("onebit_adam", "freeze", 2.5), ("onebit_adam", "freeze", float("nan")),
    ("onebit_adam", "v_floor", -1.0), ("onebit_lamb", "coeff_beta", 1.0), ("onebit_lamb", "factor_min", 0.0),
    ("onebit_lamb", "factor_max", 0.5), ("onebit_lamb", "factor_threshold", 1.0), ("zeroone_adam", "variance_every", 0),
    ("zeroone_adam", "local_steps", 0), ("zeroone_adam", "local_every", 0.0), ("zeroone_adam", "variance_every", 1.5)])
def test_keys_that_cannot_be_are_refused_by_name(name, key, value):
    with pytest.raises(ConfigError, match=f"optimizer.{key} is "):
        made(OPTIMIZERS[name], **{key: value})
