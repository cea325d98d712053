"""Models of text: what Hugging Face's transformers compute with the same values, and what tokens say of padding."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from zoo import FORWARD, GRADIENTS, _near, _without_noise, tokens, transformers

from mpitrain.autograd import no_grad
from mpitrain.errors import ConfigError, DataError, MeshError, ShapeError
from mpitrain.models import MODELS
from mpitrain.models.encoder_decoder import distances
from mpitrain.placement.tensor_plan import narrow, read_plan

BERT = {"layers": 2, "heads": 2, "width": 16, "hidden": 24, "block": 12, "vocabulary": 30, "dropout": 0.0}
DISTILBERT = {key: value for key, value in BERT.items() if key != "types"}
LLAMA = {"layers": 2, "heads": 4, "key_heads": 2, "width": 32, "hidden": 40, "block": 16, "vocabulary": 30}
T5 = {"layers": 2, "heads": 2, "width": 16, "head_width": 6, "hidden": 24, "source": 40, "block": 50, "vocabulary": 30,
      "dropout": 0.0}

# Patterns in names of theirs, and what stands there in ours.
NAMES: dict[str, list[tuple[str, str]]] = {
    "bert": [
        (r"^bert\.", ""), (r"embeddings\.word_embeddings", "embed.token"), (r"embeddings\.position_embeddings", "embed.position"),
        (r"embeddings\.token_type_embeddings", "embed.type"), (r"embeddings\.LayerNorm", "embed.norm"),
        (r"encoder\.layer\.(\d+)\.", r"block\1."), (r"attention\.self\.", "attention."),
        (r"attention\.output\.dense", "attention.out"), (r"attention\.output\.LayerNorm", "norm1"),
        (r"intermediate\.dense", "wide"), (r"(block\d+)\.output\.dense", r"\1.narrow"),
        (r"(block\d+)\.output\.LayerNorm", r"\1.norm2"),
        (r"pooler\.dense", "first.linear"), (r"cls\.predictions\.transform\.dense", "transform.linear"),
        (r"cls\.predictions\.transform\.LayerNorm", "transform.norm"), (r"cls\.predictions\.bias", "head.bias"),
        (r"^classifier", "head")],
    "distilbert": [
        (r"^distilbert\.", ""), (r"embeddings\.word_embeddings", "embed.token"),
        (r"embeddings\.position_embeddings", "embed.position"), (r"embeddings\.LayerNorm", "embed.norm"),
        (r"transformer\.layer\.(\d+)\.", r"block\1."), (r"attention\.(q|k|v)_lin", r"attention.\1"),
        (r"attention\.out_lin", "attention.out"), (r"sa_layer_norm", "norm1"), (r"ffn\.lin1", "wide"), (r"ffn\.lin2", "narrow"),
        (r"output_layer_norm", "norm2"), (r"pre_classifier", "first.linear"), (r"^classifier", "head"),
        (r"vocab_transform", "transform.linear"), (r"vocab_layer_norm", "transform.norm"),
        (r"vocab_projector\.bias", "head.bias")],
    "llama": [
        (r"model\.embed_tokens", "embed.token"), (r"model\.layers\.(\d+)\.", r"block\1."), (r"input_layernorm", "norm1"),
        (r"post_attention_layernorm", "norm2"), (r"self_attn\.(q|k|v)_proj", r"attention.\1"),
        (r"self_attn\.o_proj", "attention.out"),
        (r"mlp\.gate_proj", "gate"), (r"mlp\.up_proj", "up"), (r"mlp\.down_proj", "down"), (r"model\.norm", "norm"),
        (r"lm_head", "head")],
    "t5": [
        (r"shared", "embed.token"), (r"(en|de)coder\.block\.(\d+)\.", r"\1coder\2."),
        (r"encoder\.final_layer_norm", "encoder_norm.norm"),
        (r"decoder\.final_layer_norm", "norm.norm"), (r"layer\.0\.SelfAttention\.", "attention."),
        (r"layer\.0\.layer_norm", "norm1"),
        (r"(decoder\d+)\.layer\.1\.EncDecAttention\.", r"\1.crossing."), (r"(decoder\d+)\.layer\.1\.layer_norm", r"\1.norm2"),
        (r"layer\.[12]\.layer_norm", "norm3"), (r"layer\.[12]\.DenseReluDense\.wi", "wide"),
        (r"layer\.[12]\.DenseReluDense\.wo", "narrow"), (r"\.o\.", ".out."), (r"relative_attention_bias", "relative"),
        (r"lm_head", "head")],
}
SHORT = {"q": "query", "k": "key", "v": "value"}
JOINED = re.compile(r"(.*)\.(query|key|value)\.(weight|bias)")


def as_ours(arrays: dict[str, Any], kind: str, own: Collection[str]) -> dict[str, Any]:
    """Their arrays under our names, which are `own`."""
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        for pattern, mine in NAMES[kind]:
            name = re.sub(pattern, mine, name)
        name = re.sub(r"\.([qkv])\.", lambda match: f".{SHORT[match[1]]}.", name)
        if name not in own and (match := JOINED.fullmatch(name)):          # one weight makes all three
            name = f"{match[1]}.qkv.{match[3]}"
            array = np.concatenate([found[name], array]) if name in found else array
        found[name] = array.T if name.endswith("relative.weight") else array
    return found


def alike(ours: Any, theirs: Any, kind: str, x: Any, wanted_of: Any) -> None:
    """Values, copied in, and gradients of the sum of outputs times fixed numbers."""
    import torch
    torch.manual_seed(0)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.1 * torch.randn_like(p))
    theirs.eval()
    ours.initialize()
    _without_noise(theirs, ours, torch)
    own = dict(ours.named_parameters())
    values = as_ours({name: p.detach().numpy() for name, p in theirs.named_parameters()}, kind, own)
    assert {name: p.shape for name, p in own.items()} == {name: value.shape for name, value in values.items()}
    ours.load_state_dict(values)
    assert ours.count_parameters() == sum(p.numel() for p in theirs.parameters())
    y, wanted = ours(x), wanted_of(theirs, torch.from_numpy(x))
    _near(y.array, wanted.detach().numpy(), FORWARD, "the output")
    weights = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    y.backward(weights)
    wanted.backward(torch.from_numpy(weights))
    gradients = as_ours({name: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy()
                         for name, p in theirs.named_parameters()}, kind, own)
    floor = 1e-3 * max(np.abs(grad).max() for grad in gradients.values())
    for name, p in own.items():
        _near(p.grad, gradients[name], GRADIENTS, f"the gradient of {name}", floor)


def bert_config(**further: Any) -> Any:
    return transformers().BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                     intermediate_size=24,
                                     max_position_embeddings=12, **further)


def distilbert_config(**further: Any) -> Any:
    return transformers().DistilBertConfig(vocab_size=30, dim=16, n_layers=2, n_heads=2, hidden_dim=24,
                                           max_position_embeddings=12,
                                           **further)


@pytest.mark.slow
def test_bert_with_masked_tokens_is_that_of_transformers():
    theirs = transformers().BertForMaskedLM(bert_config(pad_token_id=None))
    alike(MODELS["bert"](**BERT), theirs, "bert", tokens(30, 3, 11), lambda model, x: model(x).logits)


@pytest.mark.slow
def test_bert_s_pooled_position_is_that_of_transformers():
    theirs = transformers().BertModel(bert_config(pad_token_id=None))
    alike(MODELS["bert"](**BERT, head="pooled"), theirs, "bert", tokens(30, 3, 12), lambda model, x: model(x).pooler_output)


@pytest.mark.slow
def test_two_texts_with_padding_are_classified_as_in_transformers():
    x = 5 + tokens(24, 4, 12)
    x[:, 5] = x[:, 9] = 3                           # each text ends with a separator
    x[1, 10:] = x[2, 7:] = 0
    types = np.where((np.arange(12) > 5) & (x != 0), 1, 0)
    theirs = transformers().BertForSequenceClassification(bert_config(num_labels=3, pad_token_id=0))
    ours = MODELS["bert"](**BERT, head="classes", classes=3, padding=0, separator=3)

    def wanted(model: Any, x: Any) -> Any:
        return model(x, attention_mask=(x != 0).long(), token_type_ids=x.new_tensor(types)).logits
    alike(ours, theirs, "bert", x, wanted)


@pytest.mark.slow
def test_distilbert_with_masked_tokens_and_padding_is_that_of_transformers():
    x = 1 + tokens(29, 3, 12)
    x[1, 9:] = 0
    theirs = transformers().DistilBertForMaskedLM(distilbert_config(pad_token_id=0))
    alike(MODELS["distilbert"](**DISTILBERT, padding=0), theirs, "distilbert", x,
          lambda model, x: model(x, attention_mask=(x != 0).long()).logits)


@pytest.mark.slow
def test_distilbert_s_classes_are_those_of_transformers():
    theirs = transformers().DistilBertForSequenceClassification(distilbert_config(num_labels=5, pad_token_id=None))
    alike(MODELS["distilbert"](**DISTILBERT, head="classes", classes=5), theirs, "distilbert", tokens(30, 3, 12),
          lambda model, x: model(x).logits)


@pytest.mark.slow
@pytest.mark.parametrize(("key_heads", "tied"), [(2, False), (4, True), (1, True)])
def test_llama_is_that_of_transformers(key_heads, tied):
    config = transformers().LlamaConfig(vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                        num_key_value_heads=key_heads, intermediate_size=40, max_position_embeddings=16,
                                        rms_norm_eps=1e-5, tie_word_embeddings=tied, pad_token_id=None)
    theirs = transformers().LlamaForCausalLM(config)
    ours = MODELS["llama"](**{**LLAMA, "key_heads": key_heads}, tied=tied)
    alike(ours, theirs, "llama", tokens(30, 3, 15), lambda model, x: model(x).logits)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
def test_t5_is_that_of_transformers(padded):
    config = transformers().T5Config(vocab_size=30, d_model=16, d_kv=6, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
                                     pad_token_id=0)
    theirs = transformers().T5ForConditionalGeneration(config)
    x = 1 + tokens(29, 3, 50)
    if padded:
        x[1, 30:40] = 0
    ours = MODELS["t5"](**T5, **({"padding": 0} if padded else {}))

    def wanted(model: Any, x: Any) -> Any:
        mask = (x[:, :40] != 0).long() if padded else None
        return model(input_ids=x[:, :40], attention_mask=mask, decoder_input_ids=x[:, 40:]).logits
    alike(ours, theirs, "t5", x, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("both_ways", [True, False])
def test_t5_s_distances_fall_into_the_buckets_of_transformers(both_ways):
    transformers()
    import torch
    from transformers.models.t5 import modeling_t5 as attention
    one_hot, which = distances(600, both_ways)
    gap = torch.arange(600)[None, :] - torch.arange(600)[:, None]
    wanted = attention.T5Attention._relative_position_bucket(gap, bidirectional=both_ways, num_buckets=32, max_distance=128)
    np.testing.assert_array_equal(one_hot.argmax(1)[which], wanted.numpy())


# On every machine.

@pytest.mark.parametrize(("name", "arguments", "length"), [
    ("bert", BERT, 12), ("bert", BERT | {"padding": 0, "separator": 3}, 12), ("distilbert", DISTILBERT, 12), ("llama", LLAMA, 16),
    ("t5", T5, 50), ("t5", T5 | {"padding": 0}, 50)])
def test_stages_in_turn_compute_what_the_whole_does(name, arguments, length):
    model = MODELS[name](**arguments)
    model.initialize(seed=4)
    x = tokens(30, 2, length)
    wanted = model(x).array
    for cut in range(1, len(model)):
        first, second = MODELS[name](**arguments).slice(0, cut), MODELS[name](**arguments).slice(cut, len(model))
        first.initialize(seed=4)
        second.initialize(seed=4)
        np.testing.assert_array_equal(second(first(x)).array, wanted)


def test_padding_changes_nothing_of_a_text():
    model = MODELS["bert"](**BERT, padding=0)
    model.initialize()
    text = 1 + tokens(29, 1, 8)
    padded = np.concatenate([text, np.zeros((1, 4), np.int64)], axis=1)
    with no_grad():
        np.testing.assert_allclose(model(padded).array[:, :8], model(text).array, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("name", "arguments", "length"), [("bert", BERT, 12), ("t5", T5, 50)])
def test_a_row_of_padding_alone_leaves_values_and_gradients_finite(name, arguments, length, dropout):
    model = MODELS[name](**arguments | {"padding": 0, "dropout": dropout})
    model.initialize()
    x = 1 + tokens(29, 3, length)
    x[1] = 0
    y = model(x)
    y.sum().backward()
    assert np.isfinite(y.array).all() and all(np.isfinite(p.grad).all() for p in model.parameters())


def test_dropout_in_t5_s_attention_is_that_of_its_weights():
    """With the same masks, what a probability next to 0 leaves is what no dropout gives."""
    models = [MODELS["t5"](**T5 | {"padding": 0, "dropout": dropout}) for dropout in (0.0, 1e-12)]
    x = 1 + tokens(29, 2, 50)
    x[1, 30:40] = 0
    outputs = []
    for model in models:
        model.initialize(seed=2, dtype="float64")
        outputs.append(model(x).array)
    np.testing.assert_allclose(*outputs, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("name", "arguments", "error", "words"), [
    ("bert", BERT | {"head": "mask"}, ConfigError, "model.head must be one of masked, pooled, classes, none, found \"mask\""),
    ("bert", BERT | {"head": "classes"}, ConfigError, "wants a number of classes"),
    ("bert", BERT | {"classes": 2}, ConfigError, "model.head = \"masked\" and model.classes = 2"),
    ("bert", BERT | {"padding": 30}, ConfigError, "model.padding must be a token's number, 0 to 29"),
    ("bert", BERT | {"types": 1, "separator": 2}, ConfigError, "model.types is 1; set it to 2"),
    ("llama", LLAMA | {"key_heads": 3}, ConfigError, "heads must be a multiple of key_heads"),
    ("llama", LLAMA | {"heads": 3, "key_heads": 1}, ShapeError, "a width of 32 cannot be cut into 3 heads"),
    ("llama", LLAMA | {"head_width": 5}, ConfigError, "a head is 5 wide"),
    ("t5", T5 | {"padding": 77}, ConfigError, "model.padding must be a token's number")])
def test_settings_that_do_not_fit_are_named(name, arguments, error, words):
    with pytest.raises(error, match=words):
        MODELS[name](**arguments)


@pytest.mark.parametrize(("name", "arguments", "length", "words"), [
    ("bert", BERT, 13, "at most 12\\), got \\(2, 13\\); set model.block"), ("llama", LLAMA, 17, "at most 16"),
    ("t5", T5, 40, "40 of the source and those of the answer")])
def test_texts_that_do_not_fit_are_named(name, arguments, length, words):
    model = MODELS[name](**arguments)
    model.initialize()
    with pytest.raises(ShapeError, match=words):
        model(tokens(30, 2, length))
    with pytest.raises(DataError, match="31 is not in 0 ... 29"):
        model(np.full((1, length - 1 if name != "t5" else 50), 31))


def test_heads_for_keys_that_ranks_cannot_share_are_refused():
    model = MODELS["llama"](**LLAMA)
    with pytest.raises(MeshError, match=r'mesh.tp = 4 does not divide the 2 heads of "block0.attention.key"; .* mesh.tp = 2'):
        narrow(read_plan(model, model.plan), 0, 4)
