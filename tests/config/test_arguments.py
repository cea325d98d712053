"""Optimizers, schedules, losses, transforms and augmentations take keys of their own, ours and a user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import SMALL, write

from mpitrain.arguments import misfit
from mpitrain.autograd import Tensor
from mpitrain.config import Config, load_config, to_toml
from mpitrain.data.augment import augmentations
from mpitrain.data.transforms import Transforms
from mpitrain.errors import ConfigError
from mpitrain.nn import FlatStorage, Parameter, init
from mpitrain.placement.shard_cuts import probe
from mpitrain.plan.inspect import inspect_config
from mpitrain.train.build.from_config import describe, make_loss, make_optimizer, make_rate, never_thawed

OWN = """
import numpy as np
from mpitrain import nn, optim
from mpitrain.data.transforms import Transform
class Damped(optim.SGD):
    def __init__(self, model, lr=0.1, *, damping=1.0):
        super().__init__(model, lr, momentum=0.0)
        self.damping = damping
    def change(self, run, gradients, lr, step, scale):
        values, = self.parts(run)[:1]
        values -= lr * self.damping * gradients
def steps_of(*, lr, min_lr, warmup_steps, total_steps, width):
    return lambda step: lr * 0.5 ** (step // width)
class Power(nn.Loss):
    def __init__(self, exponent): self.exponent = exponent
    def total(self, output, target):
        return (((output - target) ** 2) ** (self.exponent / 2)).sum()
class Shift(Transform):
    def __init__(self, by, times=1): self.by, self.times = by, times
    def __call__(self, x): return x + self.by * self.times
def power(x, exponent=2): return x ** exponent
def noise(x, keys, size=1.0): return x + size * (keys % np.uint64(7)).astype(x.dtype)[:, None]
"""


def loaded(folder: Path, *overrides: str) -> Config:
    (folder / "own.py").write_text(OWN)
    return load_config(write(folder, SMALL), list(overrides))


def stepped(config: Config, weights: Any, gradients: Any, steps: int = 2) -> Any:
    """Weights after some steps with the optimizer of a configuration."""
    parameter = Parameter(weights.shape, init.zeros)
    parameter.name = "w"
    storage = FlatStorage([parameter])
    parameter.array[...] = weights
    optimizer = make_optimizer(config, storage)
    flat = np.zeros_like(storage.values)
    flat[:gradients.size] = gradients.reshape(-1)
    for step in range(1, steps + 1):
        optimizer.update(flat, lr=config.optimizer.lr, step=step)
    return parameter.array


@pytest.fixture
def numbers() -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((3, 4)).astype(np.float32), rng.standard_normal((3, 4)).astype(np.float32)


@pytest.mark.parametrize("alpha", [0.5, 0.9])
def test_rmsprop_takes_the_alpha_of_the_file(tmp_path: Path, numbers: tuple[Any, Any], alpha: float) -> None:
    config = loaded(tmp_path, "optimizer.name=rmsprop", "optimizer.momentum=0.0", f"optimizer.alpha={alpha}")
    torch = pytest.importorskip("torch")
    weights = torch.nn.Parameter(torch.tensor(numbers[0]))
    theirs = torch.optim.RMSprop([weights], lr=config.optimizer.lr, alpha=alpha, eps=1e-8)
    for _ in range(2):
        weights.grad = torch.tensor(numbers[1])
        theirs.step()
    np.testing.assert_allclose(stepped(config, *numbers), weights.detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize("trust", [0.001, 0.5])
def test_lars_takes_the_trust_of_the_file(tmp_path: Path, numbers: tuple[Any, Any], trust: float) -> None:
    config = loaded(tmp_path, "optimizer.name=lars", f"optimizer.trust={trust}", "optimizer.lr=0.1")
    weights, gradients = (x.astype(np.float64) for x in numbers)
    rate = 0.1 * trust * np.linalg.norm(weights) / np.linalg.norm(gradients)
    np.testing.assert_allclose(stepped(config, *numbers, steps=1), weights - rate * gradients, rtol=1e-5)


@pytest.mark.parametrize("delta", [0.3, 2.0])
def test_huber_takes_the_delta_of_the_file(tmp_path: Path, numbers: tuple[Any, Any], delta: float) -> None:
    loss = make_loss(loaded(tmp_path, "train.loss=huber", f"train.delta={delta}"), tokens=False)
    torch = pytest.importorskip("torch")
    theirs = torch.nn.HuberLoss(reduction="sum", delta=delta)(torch.tensor(numbers[0]), torch.tensor(numbers[1]))
    np.testing.assert_allclose(loss(Tensor(numbers[0]), numbers[1]).array, theirs.numpy(), rtol=1e-5)


def test_cross_entropy_leaves_out_the_label_that_the_file_says(tmp_path: Path, numbers: tuple[Any, Any]) -> None:
    loss = make_loss(loaded(tmp_path, "train.ignore_index=2", "train.label_smoothing=0.1"), tokens=False)
    labels = np.array([0, 2, 3])
    torch = pytest.importorskip("torch")
    theirs = torch.nn.CrossEntropyLoss(reduction="sum", ignore_index=2, label_smoothing=0.1)(
        torch.tensor(numbers[0]), torch.tensor(labels))
    np.testing.assert_allclose(loss(Tensor(numbers[0]), labels).array, theirs.numpy(), rtol=1e-5)
    assert loss.count(labels) == 2


def test_a_users_optimizer_schedule_and_loss_take_their_keys(tmp_path: Path, numbers: tuple[Any, Any]) -> None:
    config = loaded(tmp_path, "optimizer.name=own.py:Damped", "optimizer.damping=0.25", "optimizer.schedule=own.py:steps_of",
                    "optimizer.width=3", "optimizer.warmup_steps=0", "train.loss=own.py:Power", "train.exponent=3")
    wanted = numbers[0] - config.optimizer.lr * 0.25 * numbers[1]
    np.testing.assert_allclose(stepped(config, *numbers, steps=1), wanted, rtol=1e-6)
    rate = make_rate(config, 10)
    assert [rate(step) / config.optimizer.lr for step in (0, 2, 3, 7)] == [1.0, 1.0, 0.5, 0.25]
    found = make_loss(config, tokens=False)(Tensor(numbers[0]), numbers[1]).array
    np.testing.assert_allclose(found, (np.abs(numbers[0] - numbers[1]) ** 3).sum(), rtol=1e-5)


def test_the_configuration_that_a_run_writes_holds_them(tmp_path: Path) -> None:
    config = loaded(tmp_path, "optimizer.name=lars", "optimizer.trust=0.5", "train.loss=huber", "train.delta=2.0")
    again = load_config(write(tmp_path, to_toml(config)), [])
    assert again == config and again.optimizer.arguments == {"trust": 0.5} and again.train.arguments == {"delta": 2.0}


@pytest.mark.parametrize(("overrides", "message"), [
    (["optimizer.name=lars", "optimizer.trsut=0.5"], 'unknown key optimizer.trsut (did you mean "trust"?)'),
    (["optimizer.trust=0.5"], "unknown key optimizer.trust (known: "),
    (["optimizer.momentun=0.5"], 'unknown key optimizer.momentun (did you mean "momentum"?)'),
    (["optimizer.schedule=own.py:steps_of", "optimizer.widht=2", "optimizer.width=2"],
     'unknown key optimizer.widht (did you mean "width"?)'),
    (["optimizer.total_steps=3"], "unknown key optimizer.total_steps"),
    (["train.loss=huber", "train.detla=0.5"], 'unknown key train.detla (did you mean "delta"?)'),
    (["train.stepz=3"], 'unknown key train.stepz (did you mean "steps"?)'),
    (["train.delta=0.5"], "unknown key train.delta"),
    (["optimizer.schedule=own.py:steps_of"], "steps_of() missing 1 required keyword-only argument: 'width'"),
    (["train.loss=own.py:Power"], "missing 1 required positional argument: 'exponent'"),
    (["optimizer.name=lars", "optimizer.trust=-1.0"], "optimizer.trust is more than 0, not -1.0"),
    (["optimizer.name=lars", 'optimizer.trust="much"'], 'optimizer.trust must be a number, found "much"'),
])
def test_a_key_that_nothing_takes_is_refused_with_the_nearest(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made = describe(loaded(tmp_path, *overrides), tokens=False)
        made.rate(10)
        stepped(loaded(tmp_path, *overrides), np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
    assert message in caught.value.message and "\n" not in caught.value.message
    assert not message.startswith("unknown") or caught.value.message.startswith("on the command line: ")


WRONG = {                                          # keys of [optimizer], and what is said
    'schedule="sequential", schedules=[{name="cosine"}, {name="constant"}], milestones=[3], warmup_steps=5':
        "2 schedules, which want 1 milestones in rising order after the 5 steps of warm-up, found optimizer.milestones = [3]",
    'schedule="sequential"': "optimizer.schedules must name the schedules that follow each other, found none",
    'schedule="chained", schedules=[{nam="cosine"}]': "optimizer.schedules[0] must be a table with a name",
    'schedule="chained", schedules=[{name="cosine"}, {name="cosine", lr="x"}]':
        'optimizer.schedules[1], "cosine": optimizer.lr must be a number, found "x"',
    'schedule="chained", schedules=[{name="step", milestones=[1.5]}]':
        'optimizer.schedules[0], "step": optimizer.milestones must be a list of integers, found [1.5]',
    'schedule="chained", schedules=[{name="step", gamma=-1.0}]': "optimizer.gamma must be a finite number, 0 or more",
    'schedule="chained", schedules=[{name="cosine", lr=-1.0}]': "optimizer.lr must be a finite number, 0 or more, found -1.0",
    'schedule="chained", schedules=[{name="cosine", warmup_steps=2.5}]': "optimizer.warmup_steps must be an integer, found 2.5",
    'schedule="chained", schedules=[{name="cosine", warmup=2}]': 'has no key warmup (did you mean "warmup_steps"?)',
    'schedule="cyclic", mode=3': "optimizer.mode must be a string, found 3",
    'schedule="cyclic", step_size_up=1.5': "optimizer.step_size_up must be an integer, found 1.5",
    'schedule="plateau", patience="long"': 'optimizer.patience must be an integer, found "long"',
    'schedule="plateau", threshold=-1': "wants threshold and lr_eps of 0 or more, found -1 and",
    'name="muon", ns_coefficients=1': 'optimizer.name = "muon": optimizer.ns_coefficients must be a list of numbers, found 1',
    'name="lbfgs", history_size=2.5': "optimizer.history_size must be an integer, found 2.5",
    'name="adafactor", eps1=true': "optimizer.eps1 must be a number, found true",
    'name="asgd", t0=-1': "optimizer.t0 is 0 or more, not -1",
    "groups=[{}]": "optimizer.groups: a group needs params",
    "groups=[{params=3}]": "params is a pattern over names of parameters, or a list of them, not 3",
    'groups=[{params="*.bias", frozen="yes"}]': 'groups: the group of *.bias: frozen must be true or false, found "yes"',
    'groups=[{params="*.bias", frozen=true, lr=0.1}]': "is frozen for the whole run, and has lr = 0.1; leave out",
    'groups=[{params="*.bias", frozen=true, freeze_until=3}]': "is frozen for the whole run, and has freeze_until = 3",
    'groups=[{params="*.bias", freeze_until=1.5}]': "freeze_until must be an integer, found 1.5",
    'groups=[{params="*.bias", freeze_until=-5}]': "freeze_until is a number of steps, 0 or more, found -5",
    'groups=[{params="*.bias", lr=-1}]': "the group of *.bias has lr = -1, which must be finite, 0 or more",
    'groups=[{params="*.bias", lr=0.1, lr_factor=2}]': "has lr = 0.1 and lr_factor = 2; give one rate",
    'groups=[{params="*.bias", lr=0.1}], lr=0.0': "has lr = 0.1, and optimizer.lr = 0; give one rate",
    'groups=[{params="*.bias", betas=3}]': "the group of *.bias: betas must be a list of numbers, found 3",
    'groups=[{params="*.bias", weight_decay=-1}]': "the group of *.bias: optimizer.weight_decay is a number >= 0, not -1",
    'groups=[{params="*.bias", clip_norm=1}]':
        "clip_norm (known: amsgrad, betas, decay, eps, freeze_until, frozen, lr, lr_factor, maximize, params, weight_decay)",
    'name="lbfgs", groups=[{params="*.bias"}]': "LBFGS has one rule for all parameters; leave out optimizer.groups",
    'name="rprop", groups=[{params="*.bias", weight_decay=0.1}]': "a group has no key weight_decay",
}


@pytest.mark.parametrize("keys", WRONG)
def test_a_wrong_optimizer_schedule_or_group_is_refused_in_one_line(tmp_path: Path, keys: str) -> None:
    head, tail = SMALL.partition("[optimizer]")[0], SMALL.partition("[train]")[2]
    with pytest.raises(ConfigError) as caught:
        config = load_config(write(tmp_path, f"optimizer = {{{keys}}}\n{head}[train]{tail}"), [])
        made = describe(config, tokens=False)
        made.rate(10)
        stepped(config, np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
    assert WRONG[keys] in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize(("hint", "right", "wrong", "said"), [
    ("float", [1, 2.5, np.float32(1)], [True, "x", [1.0]], "a number"), ("bool", [True], [1, "true"], "true or false"),
    ("int | None", [3, None], [1.5, True], "an integer"),
    ("Sequence[float]", [[1, 2.0], (), np.ones(2)], [3, "ab", ["a"], [True]], "a list of numbers"),
    ("float | Sequence[float]", [1, [2]], ["x"], "a number or a list of numbers"),
    ("list[list[int]]", [[[1]]], [[1], [["a"]]], "a list of lists of integers"),
    ("Sequence[Mapping[str, Any]]", [[{"a": 1}]], [["a"], {"a": 1}], "a list of tables"),
    ("dict[str, int]", [{}], [[]], "a table"), ("tuple[int, float]", [[1, 2.0]], [3], "a list"),
    ("collections.abc.Sequence[str | int] | None", [["a", 1], None], [[1.5]], "a list of strings or integers"),
    ("Literal['a|b']", ["c"], [], "")])
def test_hints_say_what_a_key_may_be(hint: str, right: list[Any], wrong: list[Any], said: str) -> None:
    def function(key: Any) -> None: ...
    function.__annotations__["key"] = hint
    assert [misfit(function, {"key": value}, "") for value in right] == [""] * len(right)
    for value in wrong:
        assert misfit(function, {"key": value}, "at.").startswith(f"at.key must be {said}, found ")


def test_a_cyclic_rate_falls_only_where_a_gamma_is_given(tmp_path: Path) -> None:
    keys = ["optimizer.schedule=cyclic", "optimizer.mode=exp_range", "optimizer.step_size_up=4", "optimizer.warmup_steps=0"]
    assert make_rate(loaded(tmp_path, *keys), 20)(12) == pytest.approx(3e-3, rel=1e-15)
    assert make_rate(loaded(tmp_path, *keys, "optimizer.gamma=0.9"), 20)(12) == pytest.approx(3e-3 * 0.9 ** 12, rel=1e-15)


def test_the_least_fall_of_a_plateau_is_a_key_of_the_file(tmp_path: Path) -> None:
    keys = ["optimizer.schedule=plateau", "optimizer.patience=0", "optimizer.threshold=10.0", "optimizer.warmup_steps=0"]
    for key, wanted in (("optimizer.lr_eps=0.1", 3e-3), ("optimizer.eps=0.1", 3e-4)):
        rate: Any = make_rate(loaded(tmp_path, *keys, key), 20)
        rate.observe(1.0)
        assert rate(0) == pytest.approx(wanted)


def test_a_run_with_groups_makes_the_state_that_it_uses_and_no_other(tmp_path: Path) -> None:
    groups = '[{params = "a", frozen = true}, {params = "b", lr = 0.1}]'
    config, asked = loaded(tmp_path, f"optimizer.groups={groups}"), []
    parameters = [Parameter((40,), init.zeros) for _ in "abc"]
    for parameter, name in zip(parameters, "abc"):
        parameter.name = name
    storage = FlatStorage(parameters)

    def allocate(nbytes: int) -> Any:
        asked.append(nbytes)
        return aligned(nbytes)
    storage.allocate = allocate
    made = make_optimizer(config, storage)
    assert asked == [4 * 48] * 4 and made.nbytes == sum(asked)        # AdamW's two, of "b" and of "c"
    assert sum(made.state_size(p) for p in parameters) * 4 == made.nbytes


def test_a_group_that_the_run_never_thaws_gets_a_line(tmp_path: Path) -> None:
    config = loaded(tmp_path, 'optimizer.groups=[{params="*.bias", freeze_until=30}, {params="head.*", frozen=true}]')
    line, = never_thawed(config, 30)
    assert line == "optimizer.groups: the group of *.bias is not trained: freeze_until = 30, and the run has 30 steps"
    assert never_thawed(config, 31) == []
    late = "optimizer.groups: the group of *.bias is not trained: freeze_until = 50, and the run has 50 steps"
    for start, wanted in ((49, []), (50, [late])):
        config = loaded(tmp_path, f'optimizer.groups=[{{params="*.bias", freeze_until={start}}}]')
        assert [told for told in inspect_config(config, 1) if "not trained" in told] == wanted


@pytest.mark.parametrize("schedules", [
    '[{name="own.py:steps_of", width=3}, {name="own.py:steps_of", width=2, lr=3.0}]',
    '[{name="chained", schedules=[{name="own.py:steps_of", width=3}]}, {name="own.py:steps_of", width=2, lr=3.0}]'])
def test_schedules_in_schedules_are_found_in_the_folder_of_the_file(tmp_path: Path, schedules: str) -> None:
    config = loaded(tmp_path, "optimizer.schedule=sequential", "optimizer.milestones=[6]", "optimizer.warmup_steps=0",
                    "optimizer.lr=1.0", f"optimizer.schedules={schedules}")
    rate = make_rate(config, 10)
    assert [rate(step) for step in (0, 2, 3, 5, 6, 7, 8)] == [1.0, 1.0, 0.5, 0.5, 3.0, 3.0, 1.5]


@pytest.mark.parametrize(("overrides", "found", "takes"), [
    (["optimizer.name=sgd", "optimizer.betas=[0.9, 0.99]"], 'optimizer.name = "sgd" does not take optimizer.betas = [0.9, 0.99]; '
     "leave it at [0.9, 0.999], the default; it takes ", "lr, momentum, dampening, nesterov, weight_decay, decay, maximize"),
    (["optimizer.momentum=0.5"], 'optimizer.name = "adamw" does not take optimizer.momentum = 0.5; leave it at 0.9, the default; '
     "it takes ", "lr, betas, eps, weight_decay, decay, amsgrad, maximize"),
    (["optimizer.name=own.py:Damped", "optimizer.decay=matrices"], 'optimizer.name = "own.py:Damped" does not take '
     'optimizer.decay = "matrices"; leave it at "all", the default; it takes ', "lr, damping"),
    (["optimizer.name=rprop", "optimizer.weight_decay=0.1"], 'optimizer.name = "rprop" does not take optimizer.weight_decay = '
     "0.1; leave it at 0.0, the default; it takes ", "lr, etas, step_sizes, maximize")])
def test_a_key_that_an_optimizer_does_not_take_is_refused_with_those_that_it_takes(tmp_path: Path, overrides: list[str],
                                                                                   found: str, takes: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_optimizer(loaded(tmp_path, *overrides), probe())
    assert caught.value.message == f"on the command line: {found}{takes}"


def test_a_key_of_the_file_for_another_optimizer_is_refused_unless_it_is_the_default(tmp_path: Path) -> None:
    for text, refused in (("momentum = 0.8", True), ("momentum = 0.9", False), ("betas = [0.8, 0.9]", False)):
        file = write(tmp_path, SMALL.replace("lr = 3e-3", f"lr = 3e-3\n{text}"))
        config = load_config(file, ["optimizer.name=adam"])
        if not refused:
            make_optimizer(config, probe())
            continue
        with pytest.raises(ConfigError, match='optimizer.name = "adam" does not take optimizer.momentum = 0.8'):
            make_optimizer(config, probe())


def aligned(nbytes: int) -> Any:
    raw = np.empty(nbytes + 64, np.uint8)
    return raw[-raw.ctypes.data % 64:][:nbytes]


def test_a_mistake_in_the_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SMALL.replace("clip_norm", "clip_nrom"))
    config = load_config(tmp_path / "run.toml", [])
    with pytest.raises(ConfigError, match=r'unknown key optimizer.clip_nrom \(did you mean "clip_norm"') as caught:
        make_rate(config, 10)
    assert caught.value.file == str(tmp_path / "run.toml")


def test_transforms_and_augmentations_take_their_arguments(tmp_path: Path) -> None:
    config = loaded(tmp_path, 'data.transform=[{name="own.py:Shift", by=2.0, times=3}, {name="own.py:power", exponent=3}]',
                    'data.augment=[{name="own.py:noise", size=0.5}]')
    assert load_config(write(tmp_path, to_toml(config)), []) == config
    x, keys = np.ones((2, 3)), np.array([3, 12], np.uint64)
    np.testing.assert_array_equal(Transforms(config.data.transform, tmp_path)(x), np.full((2, 3), 7.0 ** 3))
    augment, = augmentations(config.data.augment, tmp_path)
    np.testing.assert_array_equal(augment(x, keys), x + 0.5 * np.array([[3], [5]]))


@pytest.mark.parametrize(("entry", "message"), [
    ({"name": "own.py:Shift", "bye": 1}, 'transform "own.py:Shift" has no data.transform.bye (did you mean "by"?)'),
    ({"name": "own.py:Shift"}, 'transform "own.py:Shift" needs data.transform.by'),
    ({"name": "own.py:power", "exponnt": 1}, 'transform "own.py:power" has no data.transform.exponnt (did you mean "exponent"?)'),
    ({"name": "scale", "by": 1}, 'transform "scale" has no data.transform.by'),
    ({"by": 1}, "a table is a name and its arguments")])
def test_an_argument_that_a_transform_does_not_take_is_refused(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    loaded(tmp_path)
    with pytest.raises(ConfigError) as caught:
        Transforms([entry], tmp_path)
    assert message in caught.value.message
