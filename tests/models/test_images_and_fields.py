"""Vision and Swin transformers beside torchvision's, U-Net and FNO beside their papers' in PyTorch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from zoo import declared, images, like_torch, torchvision

from mpitrain.autograd import Tensor, run_backward
from mpitrain.backend import CPU
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.models import MODELS
from mpitrain.parallel.pipeline.block_seconds import block_seconds

VIT = {"classes": 4, "size": 16, "patch": 4, "width": 16, "layers": 2, "heads": 2}
SWIN = {"classes": 4, "patch": 2, "width": 8, "depths": [2, 2], "heads": [2, 4], "window": 4, "drop_path": 0.0}
UNET = {"width": 4, "levels": 3}
FNO = {"width": 4, "modes": [3, 4], "layers": 2, "hidden": 8}
OF_VIT = [(r"^embed\.conv", "conv_proj"), (r"^embed\.token", "class_token"), (r"^embed\.position", "encoder.pos_embedding"),
          (r"^norm", "encoder.ln"), (r"^head", "heads.head"), (r"^block(\d+)", r"encoder.layers.encoder_layer_\1"),
          (r"norm(\d)", r"ln_\1"), (r"attention\.qkv\.", "self_attention.in_proj_"),
          (r"attention\.out", "self_attention.out_proj"), (r"wide", "mlp.0"), (r"narrow", "mlp.3")]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_vision_transformer_is_torchvision_s(dropout: float) -> None:
    theirs = torchvision().models.VisionTransformer(16, 4, 2, 2, 16, 64, dropout=dropout, num_classes=4)
    torch, _ = declared()
    torch.nn.init.normal_(theirs.heads.head.weight)              # it starts at 0, where nothing of the rest would be seen
    like_torch(MODELS["vit"](**VIT, dropout=dropout), theirs, images(3, 3, 16, 16), names=OF_VIT)


def of_swin(name: str) -> str:
    """torchvision's name of a part of `SWIN`."""
    for ours, theirs in {"embed.conv": "features.0.0", "embed.norm": "features.0.2", "merge1.norm": "features.2.norm",
                         "merge1.narrow": "features.2.reduction", "stage1_block": "features.1.", "stage2_block": "features.3.",
                         "attention.qkv": "attn.qkv", "attention.out": "attn.proj", ".bias.weight":
                         ".attn.relative_position_bias_table", "wide": "mlp.0", "narrow": "mlp.3"}.items():
        name = name.replace(ours, theirs)
    return name


@pytest.mark.parametrize("sides", [(32, 32), (26, 18), (16, 12)], ids=["whole windows", "padded", "one window alone"])
def test_a_swin_transformer_is_torchvision_s(sides: tuple[int, int]) -> None:
    swin = torchvision().models.swin_transformer.SwinTransformer
    theirs = swin([2, 2], 8, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=4)
    like_torch(MODELS["swin"](**SWIN), theirs, images(2, 3, *sides), names=of_swin,
               change={r".*\.bias\.weight": np.transpose}, modes=("train",))


def plain_unet(up: str) -> Any:
    """The paper's figure 1 with padded convolutions and norms, three levels, from 1 channel by way of 4, 8 and 16."""
    torch, _ = declared()
    n = torch.nn

    class Net(n.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            for name, inputs, outputs in (("down1", 1, 4), ("down2", 4, 8), ("down3", 8, 16), ("up2", 16, 8), ("up1", 8, 4)):
                setattr(self, name, n.ModuleDict({
                    "conv1": n.Conv2d(inputs, outputs, 3, padding=1, bias=False), "norm1": n.BatchNorm2d(outputs),
                    "conv2": n.Conv2d(outputs, outputs, 3, padding=1, bias=False), "norm2": n.BatchNorm2d(outputs)}))
                if name.startswith("up"):
                    getattr(self, name)["up"] = n.ConvTranspose2d(inputs, outputs, 2, stride=2) if up == "transposed" else \
                        n.ModuleDict({"conv": n.Conv2d(inputs, outputs, 1)})
            self.head = n.Conv2d(4, 1, 1)

        def forward(self, x: Any) -> Any:
            first = self.twice(self.down1, x)
            second = self.twice(self.down2, n.functional.max_pool2d(first, 2))
            third = self.twice(self.down3, n.functional.max_pool2d(second, 2))
            back = self.twice(self.up2, torch.cat([second, self.larger(self.up2["up"], third)], 1))
            return self.head(self.twice(self.up1, torch.cat([first, self.larger(self.up1["up"], back)], 1)))

        @staticmethod
        def twice(m: Any, x: Any) -> Any:
            return m["norm2"](m["conv2"](m["norm1"](m["conv1"](x)).relu())).relu()

        @staticmethod
        def larger(m: Any, x: Any) -> Any:
            return m(x) if up == "transposed" else n.functional.interpolate(m["conv"](x), scale_factor=2, mode="bilinear",
                                                                            align_corners=False)
    return Net()


@pytest.mark.parametrize("up", ["transposed", "bilinear"])
def test_a_unet_that_carries_its_ways_around_is_one_that_keeps_them(up: str) -> None:
    like_torch(MODELS["unet"](**UNET, up=up), plain_unet(up), images(2, 1, 16, 24), names=lambda name: name, dtype="float64")


@pytest.mark.parametrize("cuts", [(2,), (3,), (5,), (1, 2, 3, 4, 5, 6)], ids=str)
def test_stages_of_a_unet_pass_one_tensor_on_wherever_it_is_cut(cuts: tuple[int, ...]) -> None:
    """Stages in turn, with the gradients of what travels, compute what the whole does."""
    whole, x = MODELS["unet"](**UNET), images(2, 1, 8, 12).astype(np.float64)
    whole.initialize(3, "float64")
    wanted = whole(x)
    (wanted * wanted).sum().backward()
    grads = {name: p.grad.copy() for name, p in whole.named_parameters()}
    parts = [whole.slice(a, b) for a, b in pairwise((0, *cuts, len(whole)))]
    for p in whole.parameters():
        p.zero_grad()
    given, outputs = [], []
    for part in parts:
        given.append(Tensor(outputs[-1].array.copy() if outputs else x, requires_grad=True))
        outputs.append(part(given[-1]))
        assert isinstance(outputs[-1], Tensor)
    (outputs[-1] * outputs[-1]).sum().backward()
    for before, after in zip(reversed(outputs[:-1]), reversed(given[1:])):
        run_backward(before, after.grad)
    np.testing.assert_array_equal(outputs[-1].array, wanted.array)
    for name, p in whole.named_parameters():
        np.testing.assert_allclose(p.grad, grads[name], rtol=1e-12, atol=1e-14, err_msg=name)


def test_the_blocks_of_a_unet_are_timed_for_equal_stages() -> None:
    seconds = block_seconds(MODELS["unet"](**UNET), images(2, 1, 8, 8), seed=0, precision="float32", device=CPU, tokens=False)
    assert len(seconds) == 7 and all(s > 0 for s in seconds)


def plain_fno(padding: int = 0) -> Any:
    """The paper's equations for `FNO`, with its two complex tensors a layer, as its authors' code has them."""
    torch, _ = declared()
    n = torch.nn

    class Net(n.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.wide, self.narrow = n.Conv2d(3, 4, 1), n.Conv2d(4, 8, 1), n.Conv2d(8, 1, 1)
            self.convs = n.ModuleList([n.Conv2d(4, 4, 1) for _ in range(2)])
            self.spectral = n.ParameterList([n.Parameter(0.3 * torch.randn(6, 4, 4, 4, 2)) for _ in range(2)])

        def forward(self, x: Any) -> Any:
            batch, _, height, width = x.shape
            down, right = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
            grid = torch.stack([down, right]).to(x.dtype).expand(batch, 2, height, width)
            h = n.functional.pad(self.lift(torch.cat([x, grid], 1)), (0, padding, 0, padding))
            height, width = h.shape[2:]
            for i in range(2):
                spectrum, weight = torch.fft.rfft2(h), torch.view_as_complex(self.spectral[i])
                out = torch.zeros_like(spectrum)
                out[:, :, :3, :4] = torch.einsum("nchw,hwco->nohw", spectrum[:, :, :3, :4], weight[:3])
                out[:, :, -3:, :4] = torch.einsum("nchw,hwco->nohw", spectrum[:, :, -3:, :4], weight[3:])
                h = torch.fft.irfft2(out, s=(height, width)) + self.convs[i](h)
                h = n.functional.gelu(h) if i == 0 else h
            h = h[:, :, :height - padding, :width - padding]
            return self.narrow(n.functional.gelu(self.wide(h)))
    return Net()


@pytest.mark.parametrize(("sides", "padding"), [((8, 12), 0), ((9, 7), 0), ((6, 8), 3)], ids=["even", "odd", "padded"])
def test_an_fno_is_its_paper_s(sides: tuple[int, int], padding: int) -> None:
    names = [(r"^lift\.conv", "lift"), (r"^layer(\d)\.conv", r"convs.\1"), (r"^layer(\d)\.spectral\.weight", r"spectral.\1")]
    like_torch(MODELS["fno"](**FNO, padding=padding), plain_fno(padding), images(2, 1, *sides), names=names)


def test_sizes_follow_the_papers_formulas() -> None:
    width, modes, layers, hidden = 32, 12, 4, 128                # the code of the FNO's authors counts a complex number as one
    complex_numbers = layers * 2 * modes ** 2 * width ** 2
    others = 4 * width + layers * (width ** 2 + width) + (width + 1) * hidden + hidden + 1
    assert complex_numbers + others == 1_188_353
    assert MODELS["fno"]().count_parameters() == 2 * complex_numbers + others
    widths = [64, 128, 256, 512, 1024]
    convolutions = sum(9 * (i + o) * o for i, o in zip([1, *widths], widths)) + sum(9 * 3 * o * o for o in widths[:-1])
    norms = sum(4 * o for o in widths) + sum(4 * o for o in widths[:-1])
    ups = sum(2 * o * o * 4 + o for o in widths[:-1])
    assert MODELS["unet"](classes=2).count_parameters() == convolutions + norms + ups + 2 * 64 + 2


def test_an_autoencoder_s_pieces_fit_and_a_vae_draws_in_training_alone() -> None:
    model = MODELS["vae"](size=8, widths=[4, 6], code=3)
    model.initialize(seed=1)
    x = images(5, 1, 8, 8)
    drawn, again = model(x).array, model(x).array
    assert drawn.shape == (5, 64 + 6) and (drawn != again).any()                 # a second use of the layer in one scope
    np.testing.assert_array_equal(drawn[:, 64:], again[:, 64:])                  # means and variances are no draws
    model.eval()
    np.testing.assert_array_equal(model(x).array, model(x).array)
    plain = MODELS["autoencoder"](size=8, widths=[4, 6], code=3)
    plain.initialize(seed=1)
    assert plain(x).shape == x.shape


@pytest.mark.parametrize(("name", "arguments", "shape", "message"), [
    ("unet", UNET, (2, 1, 10, 8), r"expects input of shape \(any, 1, multiple of 4, multiple of 4\), got \(2, 1, 10, 8\)"),
    ("fno", FNO, (2, 1, 8, 4), r"a grid of 8 x 4 points has no 3 x 4 frequencies; set model.modes to \[4, 3\] at most"),
    ("vit", VIT, (2, 3, 8, 8), r"vit expects input of shape \(any, 3, 16, 16\)")])
def test_images_that_do_not_fit_are_named(name: str, arguments: dict[str, Any], shape: tuple[int, ...], message: str) -> None:
    model = MODELS[name](**arguments)
    model.initialize()
    with pytest.raises(ShapeError, match=message):
        model(images(*shape))


def test_settings_that_do_not_fit_are_named() -> None:
    with pytest.raises(ShapeError, match="cannot cut images of 16x16 into patches of 5x5; model.size must be a multiple"):
        MODELS["vit"](**VIT | {"patch": 5})
    with pytest.raises(ShapeError, match="images of 10x10 cannot be halved 2 times; set model.size to a multiple of 4"):
        MODELS["vae"](size=10, widths=[4, 4])
    with pytest.raises(ConfigError, match='model.up must be one of transposed, bilinear, found "nearest"'):
        MODELS["unet"](up="nearest")
    with pytest.raises(ConfigError, match="model.depths must have a number of blocks for each stage"):
        MODELS["swin"](depths=[], heads=[])
