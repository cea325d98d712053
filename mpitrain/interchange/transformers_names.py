"""The names of Hugging Face's transformers for BERT, Llama and T5.

Keys that no shape tells come from the config.json beside the file, if there is one, or from the user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.errors import ConfigError, DataError
from mpitrain.interchange.name_tables import LARGEST_CONFIG
from mpitrain.interchange.names import Entry, NameTable, Shapes
from mpitrain.interchange.tensors import Array, Stored, TensorFile, shown
from mpitrain.nn import Module

JOINT = re.compile(r"(.*)\.qkv(_proj)?\.(weight|bias)")      # what no file of theirs has: queries, keys and values in one

ATTENTION = {"query": "q", "key": "k", "value": "v", "out": "o"}


class _Transformers(NameTable):
    """Where a model of ours makes queries, keys and values by one weight, theirs are put together, or it is cut.

    `parts` are the names of the three in place of "qkv", `kind` is the model_type of their config.json.
    """

    kind = ""
    parts: Sequence[str] = ()

    def incoming(self, tensors: Mapping[str, Stored], entries: Sequence[Entry]) -> Mapping[str, Stored]:
        found = dict(tensors)
        for entry in entries:
            names = self._cut(entry.theirs)
            if names and all(name in found and found[name].dtype == found[names[0]].dtype for name in names):
                three = [found.pop(name) for name in names]
                found[entry.theirs] = Stored(np.concatenate([one.bits for one in three]), three[0].dtype)
        return found

    def outgoing(self, arrays: dict[str, Array]) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for name, array in arrays.items():
            names = self._cut(name)
            found |= dict(zip(names, np.split(array, 3))) if names else {name: array}
        return found

    def _cut(self, name: str) -> list[str]:
        match = JOINT.fullmatch(name)
        return [f"{match[1]}.{part}{match[2] or ''}.{match[3]}" for part in self.parts] if match else []

    def keys(self, shapes: Shapes, file: TensorFile, given: Mapping[str, str]) -> dict[str, Any]:
        try:
            found = {"name": self.kind, **self.sizes(shapes)}
        except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
            if "model.width" in given:
                return {"name": self.kind}
            raise ConfigError(f"the tensors do not say the sizes of a {self.kind} of transformers' ({shown(error)}); give "
                              "another --names, or model.width and the others") from None
        said = self.beside(file)
        try:
            found |= {key: value for key, value in self.said(said).items() if value is not None} if said else {}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"config.json beside the tensors cannot be used: {shown(error)}; mend it, or move it and give the "
                            "keys of [model] yourself", file=file.path.with_name("config.json")) from None
        missing = [key for key in self.needed if key not in found and f"model.{key}" not in given]
        if missing:
            raise ConfigError(f"no tensor says model.{missing[0]}, and there is no config.json beside the file: give "
                              f"{' '.join(f'model.{key}=N' for key in missing)}")
        return found

    needed: Sequence[str] = ("heads",)

    def sizes(self, shapes: Shapes) -> dict[str, Any]:
        """Keys that shapes tell. KeyError and the like where they are of another model."""
        raise NotImplementedError

    def said(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Keys that a config.json says; None: it does not. ValueError where ours are not such models."""
        raise NotImplementedError

    def beside(self, file: TensorFile) -> Mapping[str, Any]:
        """The config.json beside the file; {} where there is none. DataError for one of another model."""
        path = file.path.with_name("config.json")
        if not file.path.is_file() or not path.is_file():
            return {}
        try:
            if path.stat().st_size > LARGEST_CONFIG:
                raise ValueError("it is too large")
            found = json.loads(path.read_bytes())
            if not isinstance(found, dict) or found.get("model_type") != self.kind:
                raise ValueError(f"it is not of a model of type {self.kind}")
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"config.json beside the tensors cannot be used: {shown(error)}; mend it, or move it and give the "
                            "keys of [model] yourself", file=path) from None
        return found


def layers_of(shapes: Shapes, pattern: str) -> int:
    """How many blocks names of this pattern have. ValueError where some between are not there, or none is."""
    found = {int(match[1]) for name in shapes if (match := re.match(pattern, name))}
    if not found or len(found) != max(found) + 1:
        raise ValueError(f"the blocks of {pattern} are {sorted(found)[:5]}")
    return len(found)


def plain(config: Mapping[str, Any], **wanted: Any) -> None:
    """ValueError where a config.json says something else than these."""
    for key, value in wanted.items():
        if config.get(key, value) not in (value, None):
            raise ValueError(f"{key} is {config[key]!r}, and {value!r} is what there is here")


class Bert(_Transformers):
    """BertModel, BertForMaskedLM, BertForPreTraining and BertForSequenceClassification."""

    kind, parts, prefix = "bert", ("query", "key", "value"), "bert."
    rules = (
        (r"embed\.token\.", "embeddings.word_embeddings."), (r"embed\.position\.", "embeddings.position_embeddings."),
        (r"embed\.type\.", "embeddings.token_type_embeddings."), (r"embed\.norm\.", "embeddings.LayerNorm."),
        (r"block(\d+)\.attention\.qkv\.", r"encoder.layer.\1.attention.self.qkv."),
        (r"block(\d+)\.attention\.out\.", r"encoder.layer.\1.attention.output.dense."),
        (r"block(\d+)\.norm1\.", r"encoder.layer.\1.attention.output.LayerNorm."),
        (r"block(\d+)\.wide\.", r"encoder.layer.\1.intermediate.dense."),
        (r"block(\d+)\.narrow\.", r"encoder.layer.\1.output.dense."),
        (r"block(\d+)\.norm2\.", r"encoder.layer.\1.output.LayerNorm."), (r"first\.linear\.", "pooler.dense."),
        (r"transform\.linear\.", "cls.predictions.transform.dense."),
        (r"transform\.norm\.", "cls.predictions.transform.LayerNorm."))
    passed_over: Sequence[str] = ("embeddings.position_ids", "cls.predictions.decoder.bias")

    def entries(self, model: Module) -> list[Entry]:
        if "transform" in dict(model.named_modules()):        # BertForPreTraining has a second head, for pairs of sentences.
            self.passed_over = (*self.passed_over, "pooler.dense.*", "cls.seq_relationship.*")
        return super().entries(model)

    def name_of(self, ours: str, model: Module) -> str:
        if ours.startswith("head."):
            masked = "transform" in dict(model.named_modules())
            return {"head.weight": "cls.predictions.decoder.weight", "head.bias": "cls.predictions.bias"}[ours] if masked else \
                f"classifier.{ours[5:]}"
        return super().name_of(ours, model)

    def incoming(self, tensors: Mapping[str, Stored], entries: Sequence[Entry]) -> Mapping[str, Stored]:
        words = {"gamma": "weight", "beta": "bias"}           # of files of old
        renamed = {re.sub(r"LayerNorm\.(gamma|beta)$", lambda match: f"LayerNorm.{words[match[1]]}", name): stored
                   for name, stored in tensors.items()}
        return super().incoming(renamed, entries)

    def sizes(self, shapes: Shapes) -> dict[str, Any]:
        (vocabulary, width), (block, _) = (shapes[f"embeddings.{word}_embeddings.weight"] for word in ("word", "position"))
        found = {"layers": layers_of(shapes, r"encoder\.layer\.(\d{1,6})\."), "width": width, "vocabulary": vocabulary,
                 "block": block, "types": shapes["embeddings.token_type_embeddings.weight"][0],
                 "hidden": shapes["encoder.layer.0.intermediate.dense.weight"][0]}
        if "cls.predictions.transform.dense.weight" in shapes:
            return found | {"head": "masked"}
        if "classifier.weight" in shapes:
            return found | {"head": "classes", "classes": shapes["classifier.weight"][0]}
        return found | {"head": "pooled" if "pooler.dense.weight" in shapes else "none"}

    def said(self, config: Mapping[str, Any]) -> dict[str, Any]:
        plain(config, is_decoder=False, position_embedding_type="absolute")
        words = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "silu": "silu"}
        return {"heads": int(config["num_attention_heads"]), "eps": float(config.get("layer_norm_eps", 1e-12)),
                "activation": words[config.get("hidden_act", "gelu")]}


class Llama(_Transformers):
    """LlamaForCausalLM."""

    kind, parts, needed = "llama", ("q", "k", "v"), ("heads", "block")
    rules = (
        (r"embed\.token\.", "model.embed_tokens."), (r"block(\d+)\.norm1\.", r"model.layers.\1.input_layernorm."),
        (r"block(\d+)\.norm2\.", r"model.layers.\1.post_attention_layernorm."),
        (r"block(\d+)\.attention\.qkv\.", r"model.layers.\1.self_attn.qkv_proj."),
        *((rf"block(\d+)\.attention\.{ours}\.", rf"model.layers.\1.self_attn.{theirs}_proj.")
          for ours, theirs in ATTENTION.items()),
        (r"block(\d+)\.(gate|up|down)\.", r"model.layers.\1.mlp.\2_proj."), (r"norm\.", "model.norm."), (r"head\.", "lm_head."))
    passed_over = ("model.layers.*.self_attn.rotary_emb.inv_freq",)

    def sizes(self, shapes: Shapes) -> dict[str, Any]:
        vocabulary, width = shapes["model.embed_tokens.weight"]
        return {"layers": layers_of(shapes, r"model\.layers\.(\d{1,6})\."), "width": width, "vocabulary": vocabulary,
                "hidden": shapes["model.layers.0.mlp.gate_proj.weight"][0], "tied": "lm_head.weight" not in shapes}

    def said(self, config: Mapping[str, Any]) -> dict[str, Any]:
        turns = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        plain(config, hidden_act="silu", attention_bias=False, mlp_bias=False)
        plain(turns, rope_type="default", type="default")
        heads = int(config["num_attention_heads"])
        return {"heads": heads, "key_heads": int(config.get("num_key_value_heads") or heads),
                "block": int(config["max_position_embeddings"]), "eps": float(config.get("rms_norm_eps", 1e-6)),
                "rope": float(turns.get("rope_theta") or config.get("rope_theta") or 10000.0),
                "head_width": config.get("head_dim"), "tied": config.get("tie_word_embeddings")}


class T5(_Transformers):
    """T5ForConditionalGeneration of the first T5, whose MLPs are not gated. No tensor says how long sources are: model.source."""

    kind, needed = "t5", ()
    rules = (
        (r"embed\.token\.", "shared."),
        *((rf"(en|de)coder(\d+)\.attention\.{ours}\.", rf"\1coder.block.\2.layer.0.SelfAttention.{theirs}.")
          for ours, theirs in {**ATTENTION, "relative": "relative_attention_bias"}.items()),
        *((rf"decoder(\d+)\.crossing\.{ours}\.", rf"decoder.block.\1.layer.1.EncDecAttention.{theirs}.")
          for ours, theirs in ATTENTION.items()),
        (r"(en|de)coder(\d+)\.norm1\.", r"\1coder.block.\2.layer.0.layer_norm."),
        (r"decoder(\d+)\.norm2\.", r"decoder.block.\1.layer.1.layer_norm."),
        *((rf"{part}coder(\d+)\.{ours}\.", rf"{part}coder.block.\1.layer.{at}.{theirs}.") for part, at in (("en", 1), ("de", 2))
          for ours, theirs in {"norm3": "layer_norm", "wide": "DenseReluDense.wi", "narrow": "DenseReluDense.wo"}.items()),
        (r"encoder_norm\.norm\.", "encoder.final_layer_norm."), (r"norm\.norm\.", "decoder.final_layer_norm."),
        (r"head\.", "lm_head."))
    transposed = ("*.relative_attention_bias.weight",)
    passed_over = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
                   "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight")

    def entries(self, model: Module) -> list[Entry]:
        further = re.compile(r".*coder\.block\.[1-9].*relative_attention_bias.*")      # The first block has the table of all.
        return [entry for entry in super().entries(model) if not further.fullmatch(entry.theirs)]

    def incoming(self, tensors: Mapping[str, Stored], entries: Sequence[Entry]) -> Mapping[str, Stored]:
        """A head that a file leaves out has the weight of the embedding."""
        shared = {"lm_head.weight": tensors["shared.weight"]} if "shared.weight" in tensors else {}
        return super().incoming({**shared, **tensors}, entries)

    def sizes(self, shapes: Shapes) -> dict[str, Any]:
        (vocabulary, width), first = shapes["shared.weight"], "encoder.block.0.layer"
        heads = shapes[f"{first}.0.SelfAttention.relative_attention_bias.weight"][1]
        layers = [layers_of(shapes, rf"{part}coder\.block\.(\d{{1,6}})\.") for part in ("en", "de")]
        if layers[0] != layers[1]:
            raise ValueError(f"{layers[0]} blocks read and {layers[1]} write; there are as many of both here")
        return {"layers": layers[0], "heads": heads, "width": width, "vocabulary": vocabulary,
                "head_width": shapes[f"{first}.0.SelfAttention.q.weight"][0] // heads,
                "hidden": shapes[f"{first}.1.DenseReluDense.wi.weight"][0]}

    def said(self, config: Mapping[str, Any]) -> dict[str, Any]:
        plain(config, feed_forward_proj="relu", relative_attention_num_buckets=32, relative_attention_max_distance=128)
        # Whether outputs are divided by the root of the width, which ours are where the head is tied. transformers 5 ties every
        # head, and says so here; before, it was the same thing.
        tied = config.get("scale_decoder_outputs", config.get("tie_word_embeddings"))
        return {"eps": float(config.get("layer_norm_epsilon", 1e-6)), "tied": tied}
