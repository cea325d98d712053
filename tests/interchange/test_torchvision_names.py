"""torchvision's names of its nets: a state dict of theirs comes in with the right [model], computes the same and goes back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))

import test_convolutional as nets  # noqa: E402
from saved_models import outputs  # noqa: E402
from zoo import declared, torchvision  # noqa: E402

from mpitrain.errors import ConfigError  # noqa: E402
from mpitrain.interchange import bring_in, state_dict  # noqa: E402

SMALL = {"densenet121": nets.densenet, "squeezenet: 1.1": nets.of("squeezenet1_1", num_classes=4),
         "squeezenet: 1.0": nets.of("squeezenet1_0", num_classes=4),
         "vgg11": lambda: nets.vgg((1, 1, 2, 2, 2), False, 4, 16, 5), "vgg16": lambda: nets.vgg((2, 2, 3, 3, 3), True, 2, 16, 5)}
LARGE = {"googlenet": nets.of("googlenet", num_classes=4, aux_logits=True, init_weights=False),
         **{name: nets.LARGE[name][1] for name in ("resnet101", "resnext50", "wide_resnet50", "alexnet")}}


def both_ways(tmp_path: Path, name: str, make: Callable[[], Any]) -> None:
    torch, _ = declared()
    torchvision()
    theirs = make().eval()
    saved = bring_in(theirs.state_dict(), tmp_path / "run", names="torchvision", tell=lambda _: None)
    x = np.random.default_rng(0).standard_normal((1, 3, 96, 96)).astype("f4")
    wanted = theirs(torch.from_numpy(x)).detach().numpy()
    assert np.abs(outputs(saved, x) - wanted).max() <= 1e-4 * np.abs(wanted).max()
    assert f'name = "{name.partition(":")[0]}"' in (tmp_path / "run" / "config.toml").read_text()
    back = state_dict(saved.model, "torchvision")
    kept = {key: value for key, value in theirs.state_dict().items() if not key.startswith("aux")}
    assert set(back) == set(kept) and all(np.array_equal(back[key], value.numpy()) for key, value in kept.items())


@pytest.mark.parametrize("name", SMALL)
def test_a_small_net_goes_both_ways(tmp_path: Path, name: str) -> None:
    both_ways(tmp_path, name, SMALL[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_net_of_full_width_goes_both_ways(tmp_path: Path, name: str) -> None:
    both_ways(tmp_path, name, LARGE[name])


@pytest.mark.parametrize(("shapes", "said"), [
    ({"classifier.6.weight": (10, 8)}, "has classifier.6.weight, as a net of torchvision's, and lacks features.0.weight"),
    ({"classifier.6.weight": (10, 8), "features.0.weight": ()}, "has another shape there"),
    ({"features.3.squeeze.weight": (4, 4, 1, 1)}, "lacks features.0.weight"),
    ({"features.denseblock1.denselayer1.conv2.weight": (4, 4, 3, 3)}, "lacks classifier.weight"),
    ({"inception3a.branch1.conv.weight": (4, 4, 1, 1)}, "lacks conv1.conv.weight")])
def test_a_file_with_a_part_of_a_net_is_refused_in_one_line(tmp_path: Path, shapes: dict[str, Any], said: str) -> None:
    arrays = {name: np.zeros(shape, "f4") for name, shape in shapes.items()}
    with pytest.raises(ConfigError) as caught:
        bring_in(arrays, tmp_path / "run", names="torchvision", tell=lambda _: None)
    assert said in caught.value.message and "\n" not in caught.value.message


def test_a_net_that_is_not_in_the_table_is_refused(tmp_path: Path) -> None:
    ten = nets.vgg((2, 2, 2, 2, 2), False, 2, 4, 3)
    with pytest.raises(ConfigError, match=r"10 convolutions and three linear layers; the table has 8 \(vgg11\) and 13"):
        bring_in(ten.state_dict(), tmp_path / "run", names="torchvision", tell=lambda _: None)
