"""Transformers are called as PyTorch's are, and compute what those do: arguments by place and by name, masks of both kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import Tensor, nn, ops
from mpitrain.errors import ShapeError

torch = pytest.importorskip("torch")

NAMES = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias", "out_proj.weight": "out.weight", "out_proj.bias": "out.bias"}


def renamed(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.removesuffix(theirs) + ours if name.endswith(theirs) else name
    return name


def compare(ours: Any, theirs: Any, inputs: list[Any], **named: Any) -> None:
    """Both have PyTorch's values, and get the same arguments."""
    theirs = theirs.double().eval()
    ours.initialize(dtype="float64")
    ours.load_state_dict({renamed(name): value.numpy() for name, value in theirs.state_dict().items()})
    wanted = theirs(*map(torch.from_numpy, inputs),
                    **{name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in named.items()})
    np.testing.assert_allclose(ours.eval()(*inputs, **named).array, wanted.detach().numpy(), rtol=0, atol=1e-12)


def normal(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


LATER = np.triu(np.ones((4, 4), bool), 1)
PADDING = np.array([[False, False, True, False], [False, False, False, True]])
MASKS = {"boolean": {"src_mask": LATER}, "numbers": {"src_mask": normal(4, 4)}, "padding": {"src_key_padding_mask": PADDING},
         "both": {"src_mask": LATER, "src_key_padding_mask": PADDING}, "each head": {"src_mask": normal(4, 4, 4) > 1},
         "causal": {"src_mask": LATER, "is_causal": True}}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_an_encoder_layer_takes_pytorch_s_arguments(first: bool, masks: dict[str, Any]) -> None:
    arguments = (6, 2, 10, 0.0, "gelu", 1e-4, first, True, False)
    x = normal(2, 4, 6) if first else normal(4, 2, 6)
    compare(nn.TransformerEncoderLayer(*arguments), torch.nn.TransformerEncoderLayer(*arguments), [x], **masks)
    named = {"d_model": 6, "nhead": 2, "dim_feedforward": 10, "dropout": 0.0, "layer_norm_eps": 1e-4, "batch_first": first}
    if "src_mask" in masks:
        masks = {**{name: x for name, x in masks.items() if name != "src_mask"}, "mask": masks["src_mask"]}
    compare(nn.TransformerEncoder(nn.TransformerEncoderLayer(**named), num_layers=2),
            torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(**named), num_layers=2, enable_nested_tensor=False),
            [x], **masks)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")       # of torch's own making
@pytest.mark.parametrize("first", [True, False])
def test_a_decoder_and_a_transformer_take_pytorch_s_arguments(first: bool) -> None:
    x, memory = (normal(2, 4, 6), normal(2, 3, 6)) if first else (normal(4, 2, 6), normal(3, 2, 6))
    masks = {"tgt_mask": LATER, "memory_mask": np.eye(4, 3, dtype=bool), "tgt_key_padding_mask": PADDING,
             "memory_key_padding_mask": np.array([[False, False, False], [True, False, False]])}
    named: Any = {"dropout": 0.0, "batch_first": first, "activation": "relu"}
    compare(nn.TransformerDecoderLayer(6, 2, 10, **named), torch.nn.TransformerDecoderLayer(6, 2, 10, **named), [x, memory],
            **masks)
    compare(nn.TransformerDecoder(nn.TransformerDecoderLayer(6, 2, 10, **named), 2),
            torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(6, 2, 10, **named), 2), [x, memory], **masks)
    whole = (6, 2, 1, 2, 10, 0.0)
    compare(nn.Transformer(*whole, batch_first=first), torch.nn.Transformer(*whole, batch_first=first), [memory, x],
            src_key_padding_mask=masks["memory_key_padding_mask"], **masks)


def test_is_causal_alone_is_the_mask_of_what_comes_later_and_a_function_may_be_the_activation() -> None:
    layer, x = nn.TransformerEncoderLayer(6, 2, 10, 0.0, ops.relu), normal(2, 4, 6)
    layer.initialize(dtype="float64")
    wanted = layer(x, nn.Transformer.generate_square_subsequent_mask(4)).array
    np.testing.assert_allclose(layer(x, is_causal=True).array, wanted, rtol=0, atol=1e-12)
    np.testing.assert_allclose(layer(Tensor(x), Tensor(LATER)).array, wanted, rtol=0, atol=1e-12)
    assert np.abs(layer(x).array - wanted).max() > 1e-3
    named = nn.TransformerEncoderLayer(6, 2, 10, 0.0, "relu")
    named.initialize(dtype="float64")
    np.testing.assert_allclose(named(x, is_causal=True).array, layer(x, is_causal=True).array, rtol=0, atol=1e-12)


def test_masks_that_say_nothing_are_refused_in_the_words_of_their_argument() -> None:
    layer, attention, x = nn.TransformerEncoderLayer(6, 2, 10), nn.MultiHeadAttention(6, 2), normal(2, 4, 6)
    layer.initialize(dtype="float64")
    attention.initialize(dtype="float64")
    with pytest.raises(ShapeError, match="src_mask is int64, expected bool, True where nobody looks"):
        layer(x, LATER.astype(int))
    with pytest.raises(ShapeError, match=r"src_mask has shape \(3, 4, 4\), expected \(L, S\) or \(2 samples x 2 heads, L, S\)"):
        layer(x, np.zeros((3, 4, 4), bool))
    with pytest.raises(ShapeError, match="key_padding_mask is int64, expected bool, True where a key is padding"):
        attention(x, key_padding_mask=PADDING.astype(int))
    with pytest.raises(ShapeError, match="batch_first is 'gelu', expected True or False"):
        nn.TransformerEncoderLayer(6, 2, 10, 0.1, "relu", 1e-5, "gelu")      # type: ignore[arg-type]


def test_rope_is_a_base_above_0_and_true_is_that_of_the_paper() -> None:
    layers = nn.MultiHeadAttention(8, 2, rope=True), nn.MultiHeadAttention(8, 2, rope=10000.0)
    for layer in layers:
        layer.initialize()
    x = normal(1, 4, 8).astype("float32")
    assert np.array_equal(layers[0](x).array, layers[1](x).array)
    for wrong in (0.0, -1.0, float("nan"), "10000"):
        with pytest.raises(ShapeError, match="rope is .*expected True or a base above 0"):
            nn.MultiHeadAttention(8, 2, rope=wrong)                          # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="rope and alibi are two ways"):
        nn.MultiHeadAttention(8, 2, rope=True, alibi=True)
