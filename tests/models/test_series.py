"""Models of series beside PyTorch's layers with the same values, and what each of them can see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from zoo import declared, images, like_torch

from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.models import MODELS

TCN = {"inputs": 2, "channels": [5, 5, 6], "outputs": 3}


def torch_recurrent(kind: str, inputs: int, hidden: int, outputs: int, layers: int = 1, bidirectional: bool = False) -> Any:
    torch, _ = declared()

    class Theirs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = getattr(torch.nn, kind)(inputs, hidden, layers, batch_first=True, bidirectional=bidirectional)
            self.head = torch.nn.Linear(hidden * (2 if bidirectional else 1), outputs)

        def forward(self, x: Any) -> Any:
            state = self.cells(x)[1]
            h = state[0] if kind == "LSTM" else state
            return self.head(torch.cat([h[-2], h[-1]], -1) if bidirectional else h[-1])
    return Theirs()


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, False), (2, True)])
def test_recurrent_models_are_pytorch_s(kind: str, layers: int, bidirectional: bool) -> None:
    ours = MODELS[kind.lower()](3, 12, 2, layers, 0.1, bidirectional)
    theirs = torch_recurrent(kind, 3, 12, 2, layers, bidirectional)
    assert ours.count_parameters() == sum(p.numel() for p in theirs.parameters())
    like_torch(ours, theirs, images(4, 7, 3))


def torch_tcn(inputs: int, channels: list[int], outputs: int, kernel: int, weight_norm: bool) -> Any:
    """Padded on both sides and cut at the end, as the paper's own code has it."""
    torch, _ = declared()
    normed = torch.nn.utils.parametrizations.weight_norm if weight_norm else lambda layer: layer

    class Block(torch.nn.Module):
        def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
            super().__init__()
            self.padding = (kernel - 1) * dilation
            for i, width in ((1, inputs), (2, outputs)):
                conv = torch.nn.Conv1d(width, outputs, kernel, padding=self.padding, dilation=dilation)
                setattr(self, f"conv{i}", normed(conv))
            self.shortcut = torch.nn.Conv1d(inputs, outputs, 1) if inputs != outputs else None

        def forward(self, x: Any) -> Any:
            y = x
            for conv in (self.conv1, self.conv2):
                y = conv(y)
                y = (y[:, :, :-self.padding] if self.padding else y).relu()
            return (y + (x if self.shortcut is None else self.shortcut(x))).relu()

    class Theirs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i, (a, b) in enumerate(zip([inputs, *channels], channels)):
                setattr(self, f"block{i}", Block(a, b, 2 ** i))
            self.head = torch.nn.Linear(channels[-1], outputs)

        def forward(self, x: Any) -> Any:
            x = x.transpose(1, 2)
            for i in range(len(channels)):
                x = getattr(self, f"block{i}")(x)
            return self.head(x[:, :, -1])
    return Theirs()


@pytest.mark.parametrize(("kernel", "weight_norm"), [(3, True), (2, False), (1, True)])
def test_tcn_is_pytorch_s_causal_convolutions(kernel: int, weight_norm: bool) -> None:
    ours = MODELS["tcn"](**TCN, kernel=kernel, dropout=0.2, weight_norm=weight_norm)
    theirs = torch_tcn(2, TCN["channels"], 3, kernel, weight_norm)
    assert ours.count_parameters() == sum(p.numel() for p in theirs.parameters())
    like_torch(ours, theirs, images(3, 20, 2), names=[
        (r"conv\.layer\.bias", "bias"), (r"conv\.weight_g", "parametrizations.weight.original0"),
        (r"conv\.weight_v", "parametrizations.weight.original1"), (r"\.conv\.", ".")])


def test_tcn_sees_so_many_steps_and_nothing_later() -> None:
    model = MODELS["tcn"](**TCN, kernel=3)
    model.initialize(1, "float64")
    seen = 1 + 2 * (3 - 1) * (2 ** 3 - 1)
    x = Tensor(images(2, seen + 10, 2).astype("f8"), requires_grad=True)
    model(x).sum().backward()
    assert (x.grad[:, :10] == 0).all() and (x.grad[:, 10] != 0).any()
    at_all_positions = model.slice(0, 4)                               # the blocks, without what takes the last position
    later = x.array.copy()
    later[:, 20:] += 1
    one, two = at_all_positions(x.array).array, at_all_positions(later).array
    assert np.array_equal(one[:, :, :20], two[:, :, :20]) and not np.array_equal(one[:, :, 20:], two[:, :, 20:])


def torch_fcn(inputs: int, outputs: int, channels: tuple[int, ...], kernels: tuple[int, ...]) -> Any:
    torch, _ = declared()
    layers, widths = [], [inputs, *channels]
    for a, b, kernel in zip(widths, channels, kernels):
        layers += [torch.nn.Conv1d(a, b, kernel, padding="same"), torch.nn.BatchNorm1d(b), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool1d(1), torch.nn.Flatten(), torch.nn.Linear(channels[-1], outputs))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_fcn_is_pytorch_s() -> None:
    like_torch(MODELS["fcn"](2, 3, (4, 6, 5)), torch_fcn(2, 3, (4, 6, 5), (8, 5, 3)), images(4, 19, 2), dtype="float64",
               call=lambda theirs, x: theirs(x[0].transpose(1, 2)))
    theirs = torch_fcn(1, 2, (128, 256, 128), (8, 5, 3))
    assert MODELS["fcn"](1, 2).count_parameters() == sum(p.numel() for p in theirs.parameters()) == 264_962


def torch_inception(inputs: int, outputs: int, depth: int, filters: int, bottleneck: int, kernel: int) -> Any:
    torch, _ = declared()
    nn = torch.nn

    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            groups, first = [], 0
            while first < depth:
                modules, before = [], 4 * filters if first else inputs
                for i in range(min(3, depth - first)):
                    width = 4 * filters if i else before
                    narrow = bottleneck if width > 1 and bottleneck else width
                    parts = {"bottleneck": nn.Conv1d(width, narrow, 1, bias=False)} if width > 1 and bottleneck else {}
                    parts |= {f"conv{j}": nn.Conv1d(narrow, filters, kernel // 2 ** j, padding="same", bias=False)
                              for j in range(3)}
                    parts |= {"pooled": nn.Conv1d(width, filters, 1, bias=False), "norm": nn.BatchNorm1d(4 * filters)}
                    modules.append(nn.ModuleDict(parts))
                whole = len(modules) == 3
                around = [nn.Conv1d(before, 4 * filters, 1, bias=False), nn.BatchNorm1d(4 * filters)] if whole else []
                groups.append(nn.ModuleList([nn.ModuleList(modules), *around]))
                first += 3
            self.groups, self.head = nn.ModuleList(groups), nn.Linear(4 * filters, outputs)

        def forward(self, x: Any) -> Any:
            x = x.transpose(1, 2)
            for modules, *around in self.groups:
                y = x
                for m in modules:
                    narrow = m["bottleneck"](y) if "bottleneck" in m else y
                    large = torch.nn.functional.max_pool1d(y, 3, 1, 1)
                    y = m["norm"](torch.cat([*(m[f"conv{j}"](narrow) for j in range(3)), m["pooled"](large)], 1)).relu()
                x = (y + around[1](around[0](x))).relu() if around else y
            return self.head(x.mean(-1))
    return Theirs()


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("inputs", "depth", "bottleneck"), [(1, 6, 4), (3, 4, 4), (2, 3, 0)])
def test_inception_time_is_pytorch_s(inputs: int, depth: int, bottleneck: int) -> None:
    arguments = (inputs, 2, depth, 3, bottleneck, 12)
    ours, theirs = MODELS["inception_time"](*arguments), torch_inception(*arguments)
    assert ours.count_parameters() == sum(p.numel() for p in theirs.parameters())
    like_torch(ours, theirs, images(4, 24, inputs), dtype="float64")


def test_the_default_sizes_are_the_papers() -> None:
    assert MODELS["lstm"](3, 12, 1).count_parameters() == 829        # 4 x 12 x (3 + 12 + 2) + 13
    one_network = MODELS["inception_time"](1, 2)
    first = 32 * (40 + 20 + 10) + 32                                  # three convolutions of one channel, and one of the maxima
    later = 128 * 32 + 32 * 32 * (40 + 20 + 10) + 128 * 32
    shortcuts = (1 * 128 + 2 * 128) + (128 * 128 + 2 * 128)
    assert one_network.count_parameters() == first + 5 * later + 6 * 2 * 128 + shortcuts + 128 * 2 + 2


@pytest.mark.parametrize("name", ["fcn", "inception_time"])
def test_a_model_that_takes_means_takes_series_of_any_length(name: str) -> None:
    model = MODELS[name](1, 2).eval()
    model.initialize()
    assert [model(images(2, length, 1)).shape for length in (1, 7, 30)] == [(2, 2)] * 3


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("lstm", {"inputs": 3, "hidden": 4, "outputs": 1}, r"lstm expects input of shape \(any, any, 3\), got \(2, 5, 1\)"),
    ("tcn", TCN, r"tcn expects input of shape \(any, any, 2\), got \(2, 5, 1\); set model.inputs"),
    ("fcn", {"inputs": 2, "outputs": 2}, r"fcn expects input of shape \(any, any, 2\)"),
    ("inception_time", {"inputs": 2, "outputs": 2}, r"inception_time expects input of shape \(any, any, 2\)")])
def test_samples_of_another_shape_are_named(name: str, arguments: dict[str, Any], message: str) -> None:
    model = MODELS[name](**arguments)
    model.initialize()
    with pytest.raises(ShapeError, match=message):
        model(images(2, 5, 1))


def test_settings_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="model.kernels must be a list of 2 integers"):
        MODELS["fcn"](1, 2, [4, 4])
    with pytest.raises(ConfigError, match="model.kernel must be an integer of at least 4, found 3"):
        MODELS["inception_time"](1, 2, kernel=3)
    with pytest.raises(ConfigError, match="model.channels is empty"):
        MODELS["tcn"](1, [], 2)
