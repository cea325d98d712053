"""BERT, Llama and T5 of transformers come in by their names with their outputs, and go out by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo

from mpitrain.autograd import no_grad
from mpitrain.errors import ConfigError, DataError
from mpitrain.interchange import safetensors
from mpitrain.interchange.importing import bring_in, load_state_dict
from mpitrain.interchange.names import state_dict
from mpitrain.models import MODELS

BERT = {"layers": 2, "heads": 2, "width": 16, "hidden": 24, "block": 12, "vocabulary": 30}
LLAMA = {"layers": 2, "heads": 4, "width": 32, "hidden": 40, "block": 16, "vocabulary": 30}
T5 = {"layers": 2, "heads": 2, "width": 16, "head_width": 6, "hidden": 24, "source": 8, "block": 12, "vocabulary": 30}


@pytest.mark.parametrize(("kind", "keys"), [
    ("bert", BERT), ("bert", BERT | {"head": "pooled"}), ("bert", BERT | {"head": "classes", "classes": 3}), ("llama", LLAMA),
    ("llama", LLAMA | {"key_heads": 2, "tied": True}), ("t5", T5), ("t5", T5 | {"tied": False})])
def test_a_model_goes_out_and_comes_back(kind: str, keys: dict[str, Any]) -> None:
    models = [MODELS[kind](**keys) for _ in range(2)]
    for seed, model in enumerate(models):
        model.initialize(seed)
    arrays = state_dict(models[0], kind)
    assert not [name for name in arrays if "qkv" in name]
    load_state_dict(models[1], arrays, kind)
    for one, other in zip(*(model.parameters() for model in models)):
        assert np.array_equal(one.array, other.array)


def test_sizes_that_no_tensor_says_are_asked_for(tmp_path: Path) -> None:
    model = MODELS["bert"](**BERT)
    model.initialize(0)
    arrays = state_dict(model, "bert")
    with pytest.raises(ConfigError, match=r"give model.heads=N"):
        bring_in(arrays, tmp_path / "run", names="bert")
    saved = bring_in(arrays, tmp_path / "run", names="bert", overrides=["model.heads=2"], tell=lambda text: None)
    assert {key: saved.config.model.arguments[key] for key in BERT} == BERT
    with pytest.raises(ConfigError, match="do not say the sizes of a llama"):
        bring_in(arrays, tmp_path / "other", names="llama")


@pytest.mark.parametrize("says", [{"tie_word_embeddings": False}, {"tie_word_embeddings": True, "scale_decoder_outputs": False}])
def test_the_outputs_of_a_t5_are_scaled_as_its_configuration_says_also_where_the_file_leaves_out_the_head(
        says: dict[str, bool], tmp_path: Path) -> None:
    model = MODELS["t5"](**T5, tied=False)
    model.initialize(0)
    arrays = state_dict(model, "t5")
    arrays["lm_head.weight"] = arrays["shared.weight"]
    load_state_dict(model, arrays, "t5")
    del arrays["lm_head.weight"]
    safetensors.write(tmp_path / "model.safetensors", arrays, {})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", **says}))
    saved = bring_in(tmp_path / "model.safetensors", tmp_path / "run", names="t5", tell=lambda text: None,
                     overrides=["model.source=8", "model.block=12"])
    x = np.random.default_rng(0).integers(0, 30, (3, 12))
    with no_grad():
        assert np.array_equal(saved.model(x).array, model.eval()(x).array)


def theirs_of(kind: str, **further: Any) -> Any:
    transformers = zoo.transformers()
    if kind == "bert":
        config = transformers.BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                         intermediate_size=24, max_position_embeddings=12)
        return transformers.BertModel(config)
    if kind == "llama":
        config = transformers.LlamaConfig(vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                          intermediate_size=40, max_position_embeddings=16, **further)
        return transformers.LlamaForCausalLM(config)
    config = transformers.T5Config(vocab_size=30, d_model=16, d_kv=6, d_ff=24, num_layers=2, num_heads=2, **further)
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "further", "keys"), [
    ("bert", {}, []), ("llama", {"num_key_value_heads": 2}, []),
    ("llama", {"tie_word_embeddings": True, "rope_theta": 500.0}, []), ("t5", {}, ["model.source=8", "model.block=12"]),
    ("t5", {"tie_word_embeddings": False}, ["model.source=8", "model.block=12"])])
def test_a_model_of_transformers_comes_in_with_its_outputs(kind: str, further: dict[str, Any], keys: list[str], tmp_path: Path
                                                           ) -> None:
    theirs = theirs_of(kind, **further).eval()
    import torch
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    saved = bring_in(file, tmp_path / "run", names=kind, overrides=keys, tell=lambda text: None)
    x = np.random.default_rng(0).integers(2, 30, (3, 12))
    with torch.no_grad():
        given = torch.from_numpy(x)
        wanted = theirs(given).pooler_output if kind == "bert" else theirs(given).logits if kind == "llama" else \
            theirs(input_ids=given[:, :8], decoder_input_ids=given[:, 8:]).logits
    with no_grad():
        found = saved.model(x).array
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-5 * np.abs(wanted.numpy()).max())
    back = {name: torch.from_numpy(array) for name, array in state_dict(saved.model, kind).items()}
    missing, unknown = theirs.load_state_dict(back, strict=False)
    assert not unknown and all("embed_tokens" in name for name in missing)
    (tmp_path / "theirs" / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(DataError, match=f"not of a model of type {kind}"):
        bring_in(file, tmp_path / "again", names=kind)
