"""GPT-2's 124 million parameters and ResNet-18 at 224 x 224, random weights, in PyTorch and here: both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.interchange import bring_in
from mpitrain.interchange.exporting import Wanted, export
from mpitrain.train.build.saved import SavedModel

torch = pytest.importorskip("torch", reason="needs PyTorch (pip install mpitrain[bench])")
from saved_models import outputs  # noqa: E402
from torch_models import HuggingFaceGPT2, ResNet  # noqa: E402

GPT2 = {"layers": 12, "heads": 12, "width": 768, "block": 1024, "vocabulary": 50257}


def drawn(model: Any) -> Any:
    """Values of the size that training leaves, so that no activation is huge."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.dtype.is_floating_point and value.ndim > 1:
                value.normal_(0, min(0.02, value[0].numel() ** -0.5), generator=generator)
            elif value.dtype.is_floating_point and not name.endswith(("running_var", "weight")):
                value.normal_(0, 0.1, generator=generator)
    return model.eval()


def apart(ours: np.ndarray, theirs: Any) -> float:
    return float(np.abs(ours - theirs.numpy()).max() / theirs.abs().max())


def both_directions(tmp_path: Path, theirs: Any, again: Any, names: str, x: np.ndarray) -> SavedModel:
    """Theirs in by safetensors and ours out as .pt: the outputs of PyTorch, ours and PyTorch's again."""
    from safetensors.torch import save_model
    save_model(theirs, tmp_path / "theirs.safetensors")
    saved = bring_in(tmp_path / "theirs.safetensors", tmp_path / "run", names=names, tell=lambda _: None,
                     overrides=["model.heads=12"] if names == "gpt2" else [])
    export(saved, Wanted(tmp_path / "ours.pt", names), lambda _: None)
    again.load_state_dict(torch.load(tmp_path / "ours.pt"))
    with torch.no_grad():
        wanted, back = theirs(torch.from_numpy(x)), again.eval()(torch.from_numpy(x))
    ours = outputs(saved, x)
    print(f"{names}: {apart(ours, wanted):.1e} of the largest output")
    assert apart(ours, wanted) <= 1e-5 and torch.equal(back, wanted)
    return saved


@pytest.mark.slow
def test_gpt2_of_124_million_parameters(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 50257, (2, 64))
    saved = both_directions(tmp_path, drawn(HuggingFaceGPT2(**GPT2)), HuggingFaceGPT2(**GPT2), "gpt2", tokens)
    assert saved.model.count_parameters() == 124_439_808


@pytest.mark.slow
def test_resnet18_of_images_of_224(tmp_path: Path) -> None:
    images = np.random.default_rng(0).standard_normal((2, 3, 224, 224)).astype("f4")
    saved = both_directions(tmp_path, drawn(ResNet([2, 2, 2, 2], 1000)), ResNet([2, 2, 2, 2], 1000), "torchvision", images)
    assert saved.model.count_parameters() == 11_689_512
