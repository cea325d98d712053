"""The tables of names that are built in: PyTorch's layers, GPT-2 of Hugging Face and of nanoGPT, ResNets for CIFAR."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.errors import ConfigError, DataError
from mpitrain.interchange.names import COUNTER, Entry, NameTable, Shapes, mlp_sizes
from mpitrain.interchange.tensors import Array, TensorFile, shown
from mpitrain.nn import Module, MultiHeadAttention
from mpitrain.nn.norm import _BatchNorm

LARGEST_CONFIG = 1 << 20                          # bytes of a config.json; GPT-2's has 700
JOINT = {"qkv.weight": "in_proj_weight", "qkv.bias": "in_proj_bias", "out.weight": "out_proj.weight", "out.bias": "out_proj.bias"}


class PyTorch(NameTable):
    """The paths of our modules with the leaves of torch.nn's layers: what a model of the same module names calls them there."""

    passed_over = (f"*{COUNTER}",)

    def name_of(self, ours: str, model: Module) -> str:
        for path, module in model.named_modules():
            if isinstance(module, MultiHeadAttention) and module.joint:
                for own, theirs in JOINT.items():
                    if ours == f"{path}.{own}".lstrip("."):
                        return f"{path}.{theirs}".lstrip(".")
        return ours

    def also(self, model: Module) -> dict[str, Array]:
        return counters(model, lambda path: path)

    def keys(self, shapes: Shapes, file: TensorFile, given: Mapping[str, str]) -> dict[str, Any]:
        return mlp_sizes(shapes, given)


def counters(model: Module, name_of: Any) -> dict[str, Array]:
    """The counters of steps that PyTorch's batch norms have besides; ours count nothing, so they are 0."""
    return {f"{name_of(path)}.{COUNTER}".lstrip("."): np.zeros((), np.int64) for path, module in model.named_modules()
            if isinstance(module, _BatchNorm) and module.running is not None and COUNTER not in vars(module)}


class GPT2(NameTable):
    """Hugging Face's GPT-2, whose matrices are (inputs, outputs); with `transformer.` before the names or without."""

    rules: Sequence[tuple[str, str]] = (
        (r"embed\.token\.", "wte."), (r"embed\.position\.", "wpe."), (r"block(\d+)\.norm1\.", r"h.\1.ln_1."),
        (r"block(\d+)\.attention\.qkv\.", r"h.\1.attn.c_attn."), (r"block(\d+)\.attention\.out\.", r"h.\1.attn.c_proj."),
        (r"block(\d+)\.norm2\.", r"h.\1.ln_2."), (r"block(\d+)\.wide\.", r"h.\1.mlp.c_fc."),
        (r"block(\d+)\.narrow\.", r"h.\1.mlp.c_proj."), (r"norm\.", "ln_f."), (r"head\.", "lm_head."))
    transposed: Sequence[str] = ("h.*.attn.c_attn.weight", "h.*.attn.c_proj.weight", "h.*.mlp.c_fc.weight",
                                 "h.*.mlp.c_proj.weight")
    passed_over: Sequence[str] = ("h.*.attn.bias", "h.*.attn.masked_bias")      # the causal mask of older versions
    prefix = "transformer."
    activation = "gelu_tanh"

    def entries(self, model: Module) -> list[Entry]:
        for name, leaf in model.named_parameters():
            outputs, inputs = leaf.global_shape[0], leaf.global_shape[-1]
            times = 1 if name.endswith(".attention.out.weight") else 4 if name.endswith(".wide.weight") else 0
            if times and outputs != times * inputs:
                raise ConfigError(f'"{name}" is {list(leaf.global_shape)}, and GPT-2 has heads as wide as the model together, '
                                  'and MLPs of 4 times its width: it was cut; names "own" and "pytorch" take it')
        return super().entries(model)

    def keys(self, shapes: Shapes, file: TensorFile, given: Mapping[str, str]) -> dict[str, Any]:
        token, position = shapes.get("wte.weight", shapes.get("lm_head.weight")), shapes.get("wpe.weight")
        layers = 1 + max((int(m[1]) for name in shapes if (m := re.match(r"h\.(\d{1,6})\.", name))), default=-1)
        if token is None or position is None or len(token) != 2 or len(position) != 2 or layers < 1 or layers > len(shapes):
            if "model.width" in given:
                return {"name": "gpt"}
            raise ConfigError("the file has no wte.weight and wpe.weight of two dims, and h.0 and so on, which say the sizes of "
                              "a gpt: give another --names, or model.width and the others (an ONNX graph for one length has lost "
                              "wpe: export it with dynamic_axes)")
        found: dict[str, Any] = {"name": "gpt", "layers": layers, "width": token[1], "vocabulary": token[0], "block": position[0],
                                 "bias": "h.0.attn.c_attn.bias" in shapes, "activation": self.activation}
        found |= self.said(file)
        if "model.heads" not in given and "heads" not in found:
            raise ConfigError(f"no tensor says how many heads there are: give model.heads=N (GPT-2's are 64 wide, so "
                              f"{max(1, token[1] // 64)} of a width of {token[1]})")
        return found

    def said(self, file: TensorFile) -> dict[str, Any]:
        """Keys that no shape tells: of the config.json beside the file, if there is one."""
        path = file.path.with_name("config.json")
        if not path.is_file():
            return {}
        try:
            if path.stat().st_size > LARGEST_CONFIG:
                raise ValueError("it is too large")
            found = json.loads(path.read_bytes())
            if found["model_type"] != "gpt2":
                raise ValueError(f"it is of a model of type {found['model_type']}")
            refused = [key for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention") if found.get(key)]
            if refused or found.get("n_inner") not in (None, 4 * found["n_embd"]) or not found.get("scale_attn_weights", True):
                raise ValueError(f"{' and '.join(refused) or 'n_inner or scale_attn_weights'} is not as in GPT-2")
            words = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"}
            return {"heads": int(found["n_head"]), "eps": float(found.get("layer_norm_epsilon", 1e-5)),
                    "activation": words[found.get("activation_function", "gelu_new")]}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"config.json beside the tensors cannot be used: {shown(f'{type(error).__name__}: {error}')}; mend "
                            "it, or move it and give model.heads=N", file=path) from None


class NanoGPT(GPT2):
    """nanoGPT's GPT: the same names after `transformer.`, matrices as PyTorch stores them, GELU by erf."""

    rules = tuple((ours, theirs if theirs == "lm_head." else f"transformer.{theirs}") for ours, theirs in GPT2.rules)
    transposed = ()
    passed_over = tuple(f"transformer.{name}" for name in GPT2.passed_over)
    prefix = ""
    activation = "gelu"

    def keys(self, shapes: Shapes, file: TensorFile, given: Mapping[str, str]) -> dict[str, Any]:
        return super().keys({name.removeprefix("transformer."): shape for name, shape in shapes.items()}, file, given)

    def said(self, file: TensorFile) -> dict[str, Any]:
        """The number of heads, which its ckpt.pt has in `model_args`."""
        found = file.metadata.get("model_args")
        heads = found.get("n_head") if isinstance(found, dict) else None
        return {"heads": heads} if type(heads) is int else {}


class _ResNet(NameTable):
    passed_over: Sequence[str] = (f"*{COUNTER}",)
    models: dict[tuple[tuple[int, ...], int], str] = {}      # blocks of each stage, convolutions of each -> the model's name
    head = ""

    def also(self, model: Module) -> dict[str, Array]:
        return counters(model, lambda path: self.name_of(f"{path}.", model).rstrip("."))

    def keys(self, shapes: Shapes, file: TensorFile, given: Mapping[str, str]) -> dict[str, Any]:
        blocks: dict[int, set[int]] = {}
        for name in shapes:
            if match := re.match(r"layer(\d)\.(\d{1,3})\.conv1\.weight", name):
                blocks.setdefault(int(match[1]), set()).add(int(match[2]))
        counted = tuple(len(blocks[stage]) for stage in sorted(blocks))
        each = 3 if "layer1.0.conv3.weight" in shapes else 2
        first, last = shapes.get("conv1.weight", ()), shapes.get(f"{self.head}.weight", ())
        if (counted, each) not in self.models or len(first) != 4 or len(last) != 2:
            known = ", ".join(f"{name} {list(counts)} of {n}" for (counts, n), name in self.models.items())
            raise ConfigError(f"the file has blocks {list(counted)} of {each} convolutions in its stages; the table has {known}")
        return {"name": self.models[counted, each], "classes": last[0], "channels": first[1]}


class Akamaster(_ResNet):
    """The ResNets for CIFAR of github.com/akamaster/pytorch_resnet_cifar10, whose shortcuts have no parameters."""

    rules = ((r"conv\.", "conv1."), (r"norm\.", "bn1."), (r"stage(\d)_block(\d+)\.conv", r"layer\1.\2.conv"),
             (r"stage(\d)_block(\d+)\.norm", r"layer\1.\2.bn"), (r"head\.", "linear."))
    models = {((3, 3, 3), 2): "resnet20", ((5, 5, 5), 2): "resnet32", ((9, 9, 9), 2): "resnet56"}
    head = "linear"
