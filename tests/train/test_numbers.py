"""Numbers that go wrong: NaN, a loss that is no sum, a model that nothing trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
from runs import SMALL, batch, lines, marks, ok, record, refused, steps, without_times, write
from standing import train

OWN = 'name = "net.py:net"'
MLP = 'name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10'


def own(folder: Path, source: str) -> Path:
    """A small run whose model, or loss, is in net.py."""
    head = "import numpy as np\nfrom mpitrain import nn, ops\nfrom mpitrain.autograd import Tensor\n"
    (folder / "net.py").write_text(head + source)
    return write(folder, SMALL.replace(MLP, OWN) if "def net" in source else SMALL)


# ---- the trial at the start -----------------------------------------------------------------------------------------

LOSS = """
class Mine(nn.Loss):
    kind = "classes"
    def __call__(self, output, target):
        log_p = ops.log_softmax(output)[np.arange(len(target)), target]
        return {}
"""


@pytest.mark.promise("D1")
def test_a_loss_that_is_a_mean_is_refused_with_the_cure_and_the_sum_trains(tmp_path: Path) -> None:
    config = own(tmp_path, LOSS.format("-log_p.mean()"))
    refused(train(2, config, "train.loss=net.py:Mine", "run.out=mean"), 78, "E_CONFIG", 'train.loss, "net.py:Mine",',
            "gives the mean over its samples", "return the sum over rows")
    assert not (tmp_path / "mean").exists()
    own(tmp_path, LOSS.format("-log_p.sum()"))
    ok(train(2, config, "train.loss=net.py:Mine", "run.out=sum", "train.steps=3"))
    ok(train(2, config, "run.out=built-in", "train.steps=3"))
    assert [line["loss"] for line in steps(tmp_path / "sum")] == pytest.approx(
        [line["loss"] for line in steps(tmp_path / "built-in")], rel=1e-5)


@pytest.mark.parametrize("count", ["1", "len(target)"])
def test_a_mean_is_a_mean_however_its_terms_are_counted(count: str) -> None:
    import numpy as np

    from mpitrain import nn, ops
    from mpitrain.autograd import Tensor
    from mpitrain.errors import ConfigError
    from mpitrain.train.build.trial import try_loss
    scope: dict[str, Any] = {"nn": nn, "ops": ops, "np": np}
    exec(LOSS.format("-log_p.mean()") + f"    def count(self, target): return {count}\n", scope)
    rng = np.random.default_rng(3)
    output, target = Tensor(rng.standard_normal((4, 5)).astype(np.float32)), np.array([0, 4, 2, 2])
    with pytest.raises(ConfigError, match="gives the mean over its samples"):
        try_loss(scope["Mine"](), [output], target, target)


def test_a_loss_of_pairs_of_samples_is_told_and_sums_are_not() -> None:
    import numpy as np

    from mpitrain import nn, ops
    from mpitrain.autograd import Tensor
    from mpitrain.train.build.trial import try_loss

    class Pairs(nn.Loss):
        def __call__(self, output: Any, target: Any) -> Any:
            return (output.sum(0) * output.sum(0)).sum()

    class Ignoring(nn.Loss):
        kind = "classes"

        def __call__(self, output: Any, target: Any) -> Any:
            return ops.cross_entropy(output, target, ignore_index=2)

    class Nothing(nn.Loss):
        def __call__(self, output: Any, target: Any) -> Any:
            return (output * 0.0).sum()

    rng = np.random.default_rng(3)
    output, labels = Tensor(rng.standard_normal((4, 5)).astype(np.float32)), np.array([0, 4, 2, 2])
    assert "is not a sum over its samples" in try_loss(Pairs(), [output], output.array, output.array)
    assert try_loss(Ignoring(), [output], labels, labels) == ""
    assert "is 0 for 4 samples, whatever the model gives for them" in try_loss(Nothing(), [output], output.array, output.array)


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_a_loss_that_varies_is_taken_where_the_first_outputs_are_equal_or_it_wants_positive_ones(first: float) -> None:
    import numpy as np

    from mpitrain import nn, ops
    from mpitrain.autograd import Tensor
    from mpitrain.train.build.trial import try_loss
    scope: dict[str, Any] = {"nn": nn, "ops": ops, "np": np}
    exec(LOSS.format("-log_p.sum()"), scope)

    class Picky(nn.Loss):
        def __call__(self, output: Any, target: Any) -> Any:
            if (output.array < 0).any():
                raise ValueError("expected probabilities")
            return (output * output).sum()

    output, labels = Tensor(np.full((4, 5), first, np.float32)), np.array([0, 4, 2, 2])
    assert try_loss(scope["Mine"](), [output], labels, labels) == ""
    assert try_loss(Picky(), [output], output.array, output.array) == ""


@pytest.mark.parametrize("count", ["-1", 'float("nan")', 'float("inf")', "None"])
def test_a_count_that_is_no_number_of_terms_is_refused(count: str) -> None:
    import numpy as np

    from mpitrain import nn, ops
    from mpitrain.autograd import Tensor
    from mpitrain.errors import ConfigError
    from mpitrain.nn.loss import terms
    from mpitrain.train.build.trial import try_loss
    scope: dict[str, Any] = {"nn": nn, "ops": ops, "np": np}
    exec(LOSS.format("-log_p.sum()") + f"    def count(self, target): return {count}\n", scope)
    output, target = Tensor(np.eye(4, 5, dtype=np.float32)), np.array([0, 4, 2, 2])
    for refuses in (lambda: try_loss(scope["Mine"](), [output], target, target), lambda: terms(scope["Mine"](), target)):
        with pytest.raises(ConfigError, match="Mine\", is the number of terms in its sum over 4 samples, 0 or more, found"):
            refuses()


@pytest.mark.promise("D1")
def test_a_step_without_terms_and_a_model_without_parameters_are_refused(tmp_path: Path) -> None:
    config = own(tmp_path, LOSS.format("-log_p.sum()") + "    def count(self, target): return 0\n")
    refused(runs.train(2, config, "train.loss=net.py:Mine"), 78, "E_CONFIG", "step=1",
            "is 0 for all samples of the step, whose loss is")
    config = own(tmp_path, "def net(): return nn.ReLU()\n")
    refused(train(1, config), 78, "E_CONFIG", "ReLU, has nothing to train: it has no parameters")
    config = own(tmp_path, "def net(): return nn.Linear(64, 10).requires_grad_(False)\n")
    refused(train(1, config), 78, "E_CONFIG", "Linear, has nothing to train: all 2 parameters of it are frozen")


SEVERAL = """
class Net(nn.Module):
    def __init__(self):
        self.linear = nn.Linear(6, 12)
    def forward(self, x):
        return self.linear(x).reshape(-1, 4, 3)
def net(): return Net()
class Rows(nn.Loss):
    kind = "rows"
    def __call__(self, output, target):
        kept = (target.reshape(-1) != -100).nonzero()[0]
        return ops.cross_entropy(output.reshape(-1, 3)[kept], target.reshape(-1)[kept])
    def count(self, target):
        return int((target != -100).sum())
"""


@pytest.mark.promise("D1")
def test_labels_of_several_dims_train_as_those_of_one(tmp_path: Path) -> None:
    import h5py
    import numpy as np
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, (60, 4))
    y[5:20, 1] = -100
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file["x"], file["y"] = rng.standard_normal((60, 6)).astype("f4"), y
    config = own(tmp_path, SEVERAL)
    more = ("data.path=s.h5", "data.validation=tail:0.2", "train.steps=4", "train.eval_every=4", "train.batch_size=12")
    ok(train(2, config, *more, "train.ignore_index=-100", "run.out=a"))
    ok(train(2, config, *more, "train.loss=net.py:Rows", "run.out=b"))
    a, b = lines(tmp_path / "a"), lines(tmp_path / "b")
    assert [line["loss"] for line in a] == pytest.approx([line["loss"] for line in b], rel=1e-6)
    assert 0 < a[-1]["accuracy"] < 1 and a[-1]["accuracy"] * 48 == pytest.approx(round(a[-1]["accuracy"] * 48))
    refused(train(1, config, *more, "run.out=c"), 65, "E_DATA", "row=5", "label -100 is outside 0..2 (3 classes)")
    refused(train(1, config, *more, "train.loss=mse", "run.out=c"), 65, "unless they are labels of classes")


@pytest.mark.parametrize(("source", "key", "words"), [
    ("class Mine(nn.Loss):\n    kind = 'class'\n    def total(self, o, t): return o.sum()\n", "train.loss=net.py:Mine",
     ("E_CONFIG", 'found "class" (did you mean "classes"?)')),
    ("def mine(output, target): return output.sum()\n", "train.loss=net.py:mine",
     ("E_CONFIG", "is a function of output and target, expected a class such as nn.Loss, or a function that makes"))])
def test_words_for_mistakes_in_losses_and_numbers(tmp_path: Path, source: str, key: str, words: tuple[str, ...]) -> None:
    from mpitrain.config import load_config
    from mpitrain.errors import ConfigError
    from mpitrain.train.build.from_config import describe
    with pytest.raises(ConfigError) as error:
        describe(load_config(own(tmp_path, source), [key]), False)
    assert all(word in f"{error.value.code} {error.value}" for word in words), error.value


def test_numbers_larger_than_what_they_count_get_a_line(tmp_path: Path) -> None:
    from mpitrain.config import load_config
    from mpitrain.train.build.from_config import describe, too_many
    config = load_config(write(tmp_path), ["optimizer.warmup_steps=7", "train.recompute=4"])
    model = describe(config, False).model
    assert too_many(config, model, 8) == ["train.recompute = 4 is a number of blocks, and the model has 3: all of them run again"]
    first, _ = too_many(config, model, 7)
    assert first == "the run ends while its learning rate still rises: optimizer.warmup_steps = 7, and the run has 7 steps"
    assert too_many(load_config(write(tmp_path), ["train.recompute=true"]), model, 6) == []


def test_a_key_of_the_built_in_run_is_named_as_its_own(tmp_path: Path) -> None:
    from mpitrain.config import load_config
    from mpitrain.errors import ConfigError
    from mpitrain.placement.shard_cuts import probe
    from mpitrain.train.build.from_config import describe
    with pytest.raises(ConfigError, match="optimizer.weight_decay = 0.01 of digits.toml; leave it at 0.0"):
        describe(load_config(None, ["optimizer.name=rprop"]), False).optimizer(probe())
    config = load_config(own(tmp_path, ""), ["optimizer.name=rprop", "optimizer.weight_decay=0.5"])
    with pytest.raises(ConfigError, match="optimizer.weight_decay = 0.5; leave it at 0.0"):
        describe(config, False).optimizer(probe())


@pytest.mark.promise("D1")
def test_numbers_that_the_model_s_format_has_not_are_named_with_their_row(tmp_path: Path) -> None:
    import h5py
    import numpy as np
    x = np.zeros((40, 64), np.int64)
    x[33, 7] = (1 << 24) + 1
    with h5py.File(tmp_path / "i.h5", "w") as file:
        file["x"], file["y"] = x, np.arange(40) % 10
    config, more = write(tmp_path), ("data.path=i.h5", "data.transform=[]", "train.steps=1", "train.batch_size=32")
    refused(train(1, config, *more), 65, "E_DATA", "row=33", "holds each whole number up to 16777216, but not 16777217")
    ok(train(1, config, *more, "train.precision=float64", "run.out=b"))
    x[33, 7] -= 1
    with h5py.File(tmp_path / "i.h5", "w") as file:
        file["x"], file["y"] = x * np.float64(2e35), np.arange(40) % 10
    refused(train(1, config, *more, "run.out=c"), 79, "E_NAN", "the data's float64 values, which are too large for the model's")


def test_targets_and_inputs_of_another_kind_say_what_to_store_or_write(tmp_path: Path) -> None:
    import h5py
    import numpy as np
    config = own(tmp_path, "def net(): return nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(128, 10))\n")
    x = np.ones((40, 64), np.int32)
    for y, key, words in ((np.arange(40) % 10, "",
                           ("samples of shape (64,) (int32, cast to float32)", "x.long() makes indices")),
                          (np.ones((40, 1), "f4"), 'model.name="mlp"', ("wants integer labels, the targets are float32",)),
                          (np.ones(40, bool), 'model.name="mlp"', ("the targets are bool; store integers",)),
                          (np.ones((40, 1), "i4"), 'model.name="mlp"', ("or to be stored as one label a row",))):
        with h5py.File(tmp_path / "i.h5", "w") as file:
            file["x"], file["y"] = x, y
        mlp = ("model.inputs=64", "model.hidden=[8]", "model.outputs=10") if key else ()
        refused(train(1, config, "data.path=i.h5", "data.transform=[]", "train.batch_size=8", *([key] if key else []), *mlp),
                65, "E_SHAPE", *words)


def test_an_error_in_a_step_of_an_own_forward_has_its_line(tmp_path: Path) -> None:
    config = own(tmp_path, "class Net(nn.Linear):\n    def forward(self, x):\n        y = super().forward(x.reshape(-1, 64))\n"
                           "        first = y[0]\n        y[:, 1] = 0\n        return y + first\ndef net(): return Net(64, 10)\n")
    refused(runs.train(1, config), 70, "E_GRAPH", "step=1", "at net.py:8 in forward", "or change a copy, x = x.clone()")


@pytest.mark.promise("D1")
def test_a_loss_that_is_the_same_for_any_output_is_refused(tmp_path: Path) -> None:
    config = own(tmp_path, LOSS.format("(0 * log_p).sum() + 2.5"))
    refused(train(2, config, "train.loss=net.py:Mine", "run.out=a"), 78, "E_CONFIG", "is 2.5 for 4 samples, whatever the model",
            "training would change nothing")
    assert not (tmp_path / "a").exists()


@pytest.mark.promise("D1")
def test_a_model_that_returns_an_array_is_refused_before_the_start(tmp_path: Path) -> None:
    config = own(tmp_path, """
class Plain(nn.Linear):
    def forward(self, x): return super().forward(x).array
def net(): return nn.Sequential(("flat", nn.Flatten()), ("out", Plain(64, 10)))
""")
    refused(train(2, config, "run.out=a"), 78, "E_CONFIG", "the model must return a Tensor, found numpy:ndarray", "mpitrain.ops")


CUT = """
class Cut(nn.Module):
    def forward(self, x): return Tensor(x.array)
def net(): return nn.Sequential(("flat", nn.Flatten()), ("a", nn.Linear(64, 32)), ("cut", Cut()), ("b", {}))
"""


@pytest.mark.promise("D1")
@pytest.mark.parametrize("keys", [(), ("comm.sharding=parameters",), ("mesh.pp=2",)])
def test_parameters_that_no_gradient_reaches_are_named_once_and_a_model_of_them_alone_is_refused(
        tmp_path: Path, keys: tuple[str, ...]) -> None:
    config = own(tmp_path, CUT.format("nn.Linear(32, 10)"))
    found = ok(train(2, config, "run.out=some", "train.steps=3", *keys))
    line, = [line for line in found.out.splitlines() if "got no gradient" in line]
    assert "2 of the model's parameters got no gradient in the first step" in line and "a.weight" in line and "b." not in line
    own(tmp_path, CUT.format("nn.Linear(32, 10)").replace('("cut", Cut()), ("b", nn.Linear(32, 10))',
                                                          '("b", nn.Linear(32, 10)), ("cut", Cut())'))
    refused(train(2, config, "run.out=none", *keys), 70, "E_GRAPH", "no parameter of the model got a gradient", "mpitrain.ops")


def test_a_default_run_and_one_with_frozen_parameters_say_nothing_of_gradients(tmp_path: Path) -> None:
    config = own(tmp_path, """
def net():
    frozen = nn.Linear(64, 32)
    frozen.weight.requires_grad = frozen.bias.requires_grad = False
    return nn.Sequential(("flat", nn.Flatten()), ("a", frozen), ("b", nn.Linear(32, 10)))
""")
    assert "no gradient" not in ok(train(2, config, "run.out=a", "train.steps=2")).out
    assert "no gradient" not in ok(train(3, write(tmp_path), "run.out=b", "train.steps=2", "train.micro_batches=4")).out


# ---- NaN ------------------------------------------------------------------------------------------------------------

SPOILT = """
class Spoil(nn.Module):
    \"\"\"NaN for the images whose pixels are those of `ROWS`, in training.\"\"\"
    def forward(self, x):
        if not self.training: return x
        bad = np.isin(np.round((x.array * np.arange(1, 65)).sum(axis=1) * 1e3).astype(int), np.load("bad.npy"))
        return x * Tensor(np.where(bad, np.{kind}, 1).astype(x.dtype)[:, None])
def net(): return nn.Sequential(("flat", nn.Flatten()), ("spoil", Spoil()), ("a", nn.Linear(64, 32)),
                                ("norm", nn.BatchNorm1d(32)), ("b", nn.Linear(32, 10)))
"""


def spoilt(folder: Path, rows: list[int], kind: str = "nan") -> Path:
    """A run whose second layer spoils these rows of the data."""
    marks(folder / "bad.npy", rows)
    return own(folder, SPOILT.format(kind=kind))


@pytest.mark.promise("D1")
def test_a_run_that_stops_at_nan_names_the_sample_and_leaves_a_record(tmp_path: Path) -> None:
    row = batch(4)[30]
    refused(train(2, spoilt(tmp_path, [row]), "run.out=a", "log.every=7"), 79, "E_NAN", "rank=1/2", "step=4", "micro-batch 1 ",
            'the layer "spoil" (Spoil)', f"samples {row};", "digits", "no parameter was changed")
    found = json.loads((tmp_path / "a/errors/step-4.json").read_text())
    cause, = found["causes"]
    assert (found["step"], found["seed"], cause["rank"], cause["micro_batch"], cause["rows"]) == (4, 0, 1, 1, [row])
    assert list(cause["files"].values()) == [[row]]
    ok(train(2, spoilt(tmp_path, []), "run.out=b", "train.steps=5"))
    assert not (tmp_path / "b/errors").exists()


@pytest.mark.promise("D1", "D8")
@pytest.mark.parametrize(("keys", "kind"), [((), "nan"), (("comm.sharding=parameters", "train.micro_batches=4"), "inf"),
                                            (("mesh.pp=2",), "nan"), (("comm.node_shared=true", "optimizer.clip_norm=0"), "inf"),
                                            (("train.reproducible=layout", "train.micro_batches=4"), "nan")])
def test_a_step_that_is_left_out_changes_nothing_and_the_run_goes_on(tmp_path: Path, keys: tuple[str, ...], kind: str) -> None:
    """Against a run of three steps: the fourth, left out, is the last one, and leaves its parameters and statistics."""
    same = ("optimizer.schedule=constant", "optimizer.warmup_steps=0", *keys)
    bad = batch(4)[30]
    config = spoilt(tmp_path, [bad], kind)
    ok(train(2, config, "run.out=three", "train.steps=3", *same))
    found = ok(train(2, config, "run.out=four", "train.steps=4", "train.on_nan=skip", *same))
    three, four = record(tmp_path / "three"), record(tmp_path / "four")
    assert four["parameters_sha256"] == three["parameters_sha256"] and four["buffers_sha256"] == three["buffers_sha256"]
    line, = [line for line in found.out.splitlines() if "left out" in line]
    assert line.startswith("step 4  left out: the loss of micro-batch") and "1 left out so far" in line
    assert f"samples {bad}" in line or "slices of the parameters" in line
    assert [line.get("skipped") for line in steps(tmp_path / "four")] == [None, None, None, 1]
    assert without_times(steps(tmp_path / "four"))[:3] == without_times(steps(tmp_path / "three"))
    ok(train(2, config, "run.out=six", "train.steps=6", "train.on_nan=skip", *same))
    six = steps(tmp_path / "six")
    assert [line.get("skipped") for line in six] == [None, None, None, 1, 1, 1] and six[3]["loss"] is None
    assert all(line["loss"] is not None for line in lines(tmp_path / "six") if line["step"] != 4)


OVERFLOW = """
from mpitrain.autograd import Function
class Overflow(Function):
    @staticmethod
    def forward(ctx, x): return x.copy()
    @staticmethod
    def backward(ctx, grad): return (grad * np.float32(np.inf),)
class Over(nn.Linear):
    def forward(self, x):
        marks = np.round((x.array * np.arange(1, 65)).sum(axis=1) * 1e3).astype(int)
        bad = np.isin(marks, np.load("bad.npy")) if self.training else np.zeros(1, bool)
        return Overflow.apply(super().forward(x)) if bad.any() else super().forward(x)
def net(): return nn.Sequential(("flat", nn.Flatten()), ("a", Over(64, 32)), ("b", nn.Linear(32, 10)))
"""


@pytest.mark.slow
@pytest.mark.promise("D1", "D8")
def test_a_gradient_that_overflows_on_one_rank_is_left_out_before_the_update_also_between_log_lines(tmp_path: Path) -> None:
    """The loss is finite: the norm alone shows it. A run that stops finds it where it looks, at the latest in the next loss."""
    spoilt(tmp_path, [batch(4)[30]])
    config, same = own(tmp_path, OVERFLOW), ("optimizer.schedule=constant", "optimizer.warmup_steps=0", "optimizer.clip_norm=0")
    ok(train(2, config, "run.out=three", "train.steps=3", *same))
    ok(train(2, config, "run.out=four", "train.steps=4", "train.on_nan=skip", "log.every=50", *same))
    assert record(tmp_path / "four")["parameters_sha256"] == record(tmp_path / "three")["parameters_sha256"]
    found = json.loads((tmp_path / "four/errors/step-4.json").read_text())
    assert found["causes"][0]["rows"] == batch(4) and 'the gradient of "a.' in found["causes"][0]["message"]
    ok(train(2, config, "run.out=between", "train.steps=6", "train.on_nan=skip", "log.every=50", *same))
    last, = steps(tmp_path / "between")
    assert (last["step"], last["skipped"]) == (6, 1) and last["loss"] is not None
    refused(train(2, config, "run.out=seen", *same), 79, "E_NAN", "step=4", 'the gradient of "a.', "no parameter was changed")
    refused(train(2, config, "run.out=late", "log.every=50", *same), 79, "E_NAN", "step=5", "which an earlier step has spoilt")


@pytest.mark.promise("D1")
def test_too_many_steps_left_out_in_a_row_end_the_run_on_all_ranks(tmp_path: Path) -> None:
    config = own(tmp_path, """
class Log(nn.Module):
    def forward(self, x): return ops.log(x) if self.training else x
def net(): return nn.Sequential(("flat", nn.Flatten()), ("a", nn.Linear(64, 10)), ("bad", Log()))
""")
    result = train(2, config, "run.out=a", "train.on_nan=skip")
    refused(result, 79, "E_NAN", "step=10", "10 steps in a row were not finite", '"bad" (Log)')
    assert result.out.count("left out:") == 10 and len(list((tmp_path / "a/errors").glob("step-*.json"))) == 10


def test_a_policy_whose_ranks_may_have_other_gradients_cannot_leave_steps_out(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from mpitrain.parallel.policies.replicated import Replicated\n"
                                     "class Policy(Replicated): pass\n")
    result = train(1, write(tmp_path), "train.on_nan=skip", "comm.sharding=own.py:Policy")
    refused(result, 78, "E_CONFIG", 'train.on_nan = "skip"', "a gradient of its own")
