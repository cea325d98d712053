"""Supernets: a path computes what its network does by itself, to the bit, and a step moves what it has used alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import nn, optim
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError
from mpitrain.models import MODELS
from mpitrain.nn.elastic import in_use
from mpitrain.optim.sparing import Sparing
from mpitrain.train.build.supernet import unused

RNG = np.random.default_rng(0)
IMAGES, ROWS = RNG.standard_normal((6, 1, 8, 8)).astype("f"), RNG.standard_normal((6, 16)).astype("f")
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "elastic_resnet": ({"classes": 4, "channels": 1, "widths": [8, 16], "depths": [1, 2], "kernels": [3, 5]}, Tensor(IMAGES)),
    "elastic_mlp": ({"inputs": 16, "outputs": 4, "hidden": [8, 16, 32], "depths": [1, 2, 3]}, Tensor(ROWS)),
    "elastic_gpt": ({"depths": [1, 2, 3], "heads": [1, 2, 4], "hidden": [16, 32], "width": 16, "block": 8, "vocabulary": 11},
                    RNG.integers(0, 11, (3, 8)))}


def part_of(array: Any, index: Any) -> Any:
    return array if index is None else array[np.ix_(*index)]


@pytest.mark.parametrize("name", KINDS)
def test_a_path_is_its_network_by_itself_to_the_bit_forward_and_backward(name: str) -> None:
    arguments, x = KINDS[name]
    model = MODELS[name](**arguments)
    model.initialize(0)
    elastic = model.elastic
    for path in (elastic.smallest, elastic.largest, *(elastic.draw(0, i) for i in range(6))):
        alone = MODELS[name](**arguments, path=elastic.write(path))
        alone.initialize(1)
        elastic.take(path)
        used, whole = in_use(model), model.state_dict()
        assert set(used) == set(alone.state_dict())
        alone.load_state_dict({leaf: part_of(whole[leaf], used[leaf]) for leaf in used})
        outputs = [net.eval()(x).array for net in (model, alone)]
        assert np.array_equal(*outputs)
        losses = [net.train()(x) for net in (model, alone)]
        assert np.array_equal(losses[0].array, losses[1].array)
        for net, loss in zip((model, alone), losses):
            net.zero_grad()
            loss.sum().backward()
        theirs = dict(alone.named_parameters())
        for leaf, parameter in model.named_parameters():
            if leaf not in used:
                assert parameter.grad is None, leaf
            else:
                assert np.array_equal(part_of(parameter.grad, used[leaf]), theirs[leaf].grad), leaf


def test_paths_are_counted_written_and_read() -> None:
    for name in KINDS:
        elastic = MODELS[name](**KINDS[name][0]).elastic
        assert elastic.count == len({elastic.write(path) for path in elastic.every()})
    elastic = MODELS["elastic_mlp"](inputs=4, outputs=2).elastic
    text = "depth=1, block0.width=32"
    assert elastic.write(elastic.smallest) == text == elastic.write(elastic.read(text))
    assert elastic.read("depth=2")["block1.width"] == 128
    drawn = [elastic.draw(3, step) for step in range(3000)]
    assert drawn[:50] == [elastic.draw(3, step) for step in range(50)] != [elastic.draw(4, step) for step in range(50)]
    for name, options in elastic.options.items():                # each option as often as the others: 1000 +- 5 sigma
        for option in options:
            assert abs(sum(path[name] == option for path in drawn) - 1000) < 130, name


@pytest.mark.parametrize(("name", "arguments", "said"), [
    ("elastic_mlp", {"hidden": [32, 16]}, "from the smallest to the largest"),
    ("elastic_mlp", {"depths": []}, "one number or more"),
    ("elastic_mlp", {"sampling": "sandwhich"}, 'did you mean "sandwich"'),
    ("elastic_mlp", {"path": "block0.widht=32"}, 'did you mean "block0.width"'),
    ("elastic_mlp", {"path": "block0.width=33"}, "one of 32, 64, 128, found 33"),
    ("elastic_mlp", {"path": "tiny"}, '"largest", "smallest"'),
    ("elastic_resnet", {"kernels": [3, 4]}, "odd"),
    ("elastic_resnet", {"inner": [0.01, 1.0]}, "expected 1 or more"),
    ("elastic_resnet", {"inner": "1"}, "list of numbers"),
    ("elastic_gpt", {"depths": [1], "heads": [3], "hidden": [8], "width": 16, "block": 4, "vocabulary": 5}, "3 heads")])
def test_sizes_and_paths_that_cannot_be_are_refused_by_name(name: str, arguments: dict[str, Any], said: str) -> None:
    rest = {"inputs": 4, "outputs": 2} if name == "elastic_mlp" else {}
    with pytest.raises(ConfigError, match=said.replace("(", "\\(")):
        MODELS[name](**rest, **arguments)


def torch_loss(torch: Any, w: dict[str, Any], path: dict[str, int], x: Any, y: Any) -> Any:
    """elastic_mlp's loss along a path, written for PyTorch with slices."""
    f = torch.nn.functional
    h = torch.relu(f.linear(x, w["embed.weight"], w["embed.bias"]))
    for i in range(path["depth"]):
        n, k = f"block{i}", path[f"block{i}.width"]
        normed = f.layer_norm(h, h.shape[-1:], w[f"{n}.norm.weight"], w[f"{n}.norm.bias"])
        wide = torch.relu(f.linear(normed, w[f"{n}.wide.weight"][:k], w[f"{n}.wide.bias"][:k]))
        h = h + f.linear(wide, w[f"{n}.narrow.weight"][:, :k], w[f"{n}.narrow.bias"])
    h = f.layer_norm(h, h.shape[-1:], w["norm.weight"], w["norm.bias"])
    return f.cross_entropy(f.linear(h, w["head.weight"], w["head.bias"]), y)


@pytest.mark.parametrize("rule", ["momentum", "adamw"])
def test_what_a_step_has_not_used_keeps_its_values_and_its_state(rule: str) -> None:
    """Against PyTorch's gradients and the rules in NumPy, of used elements alone; float64."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch==2.13.0")
    model = MODELS["elastic_mlp"](inputs=16, outputs=4, width=12, hidden=[4, 8, 16], depths=[1, 2, 3])
    storage = model.initialize(0, "float64")
    elastic, step = model.elastic, 0
    made = optim.SGD(model, 0.05, momentum=0.9, weight_decay=0.1) if rule == "momentum" else \
        optim.AdamW(model, 0.02, weight_decay=0.1)
    optimizer = Sparing(made, lambda: unused(model, elastic, [elastic.draw(7, step)]))
    names = [name for name, _ in model.named_parameters()]
    values = {name: p.data.copy() for name, p in model.named_parameters()}
    m, v = ({name: np.zeros_like(value) for name, value in values.items()} for _ in range(2))
    loss_of = nn.CrossEntropyLoss()
    moved = {name: np.zeros(value.shape, int) for name, value in values.items()}
    for step in range(12):
        x, y = RNG.standard_normal((8, 16)), RNG.integers(0, 4, 8)
        path = elastic.draw(7, step)
        elastic.take(path)
        model.zero_grad()
        loss_of(model(Tensor(x)), y).backward()
        optimizer.step()
        leaves = {name: torch.tensor(values[name], requires_grad=True) for name in names}
        torch_loss(torch, leaves, path, torch.tensor(x), torch.tensor(y)).backward()
        for name, index in in_use(model).items():
            where = tuple(slice(None) for _ in values[name].shape) if index is None else np.ix_(*index)
            w, g = values[name][where], leaves[name].grad.numpy()[where]
            moved[name][where] += 1
            if rule == "momentum":
                m[name][where] = 0.9 * m[name][where] + g + 0.1 * w
                values[name][where] = w - 0.05 * m[name][where]
            else:
                m[name][where] = 0.9 * m[name][where] + 0.1 * g
                v[name][where] = 0.999 * v[name][where] + 0.001 * g * g
                update = m[name][where] / (1 - 0.9 ** (step + 1))
                update /= np.sqrt(v[name][where] / (1 - 0.999 ** (step + 1))) + 1e-8
                values[name][where] = w * (1 - 0.02 * 0.1) - 0.02 * update
        for name, parameter in model.named_parameters():
            np.testing.assert_allclose(parameter.data, values[name], rtol=1e-9, atol=1e-12, err_msg=f"{name}, step {step}")
    assert {(int(count.min()), int(count.max())) for name, count in moved.items() if "wide" in name} != {(12, 12)}
    state = dict(zip((s.name for s in storage.segments), storage.views(next(iter(made.state.values())))))
    for name in names:
        np.testing.assert_allclose(state[name], m[name], rtol=1e-9, atol=1e-12, err_msg=name)
