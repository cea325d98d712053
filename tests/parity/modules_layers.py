"""PyTorch's modules without recurrence and losses as our layers, where arguments have other names."""

from __future__ import annotations

from typing import Any

from module_harness import Fitted

from mpitrain import nn, ops

SAME = """
    BatchNorm1d BatchNorm2d BatchNorm3d Bilinear CELU ELU GELU GLU Hardshrink Hardswish Hardtanh InstanceNorm1d InstanceNorm2d
    InstanceNorm3d LeakyReLU Linear LocalResponseNorm LogSigmoid LogSoftmax Mish PReLU ReLU ReLU6 SELU SiLU Sigmoid Softmax
    Softmax2d Softmin Softplus Softshrink Softsign Tanh Tanhshrink Threshold"""
PADS = " ".join(f"{kind}Pad{dims}d" for kind in ("Circular", "Constant", "Reflection", "Replication", "Zero")
                for dims in (1, 2, 3))
CONVOLUTIONS = "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d"


def group_norm(groups: int, channels: int, eps: float = 1e-5, affine: bool = True, bias: bool = True) -> nn.Module:
    return nn.GroupNorm(groups, channels, eps, affine, bias=bias)


def layer_norm(shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True) -> nn.Module:
    return nn.LayerNorm(shape, eps, bias, elementwise_affine=elementwise_affine)


def rms_norm(shape: Any, eps: float | None = None, elementwise_affine: bool = True) -> nn.Module:
    return nn.RMSNorm(shape, eps, elementwise_affine=elementwise_affine)


def embedding(num_embeddings: int, embedding_dim: int) -> nn.Module:
    return nn.Embedding(num_embeddings, embedding_dim)


def pool(kind: str) -> Any:
    """Ours take by name what comes after the padding; the sizes of adaptive pools come first."""
    def make(*args: Any, kernel_size: Any = None, **kwargs: Any) -> nn.Module:
        return getattr(nn, kind)(*(args if kernel_size is None else (kernel_size, *args)), **kwargs)
    return make


POOLS = [f"{kind}Pool{dims}d" for kind in ("AdaptiveAvg", "AdaptiveMax", "Avg", "LP", "Max") for dims in (1, 2, 3)]
ATTENTION = {"in_proj_weight": "qkv.weight", "in_proj_bias": "qkv.bias", "out_proj.weight": "out.weight",
             "out_proj.bias": "out.bias"}


def renamed(name: str) -> str:
    """Our name of a parameter, inside a transformer too."""
    for theirs, mine in ATTENTION.items():
        name = name.removesuffix(theirs) + mine if name.endswith(theirs) else name
    return name


def looking(mask: Any, heads: int = 0, samples: int = 1) -> Any:
    """PyTorch's mask, True where nobody looks, as ours; one with a first dim of samples x heads has two dims then."""
    if mask is None:
        return None
    if mask.dtype == bool:
        mask = ~(mask.array if hasattr(mask, "array") else mask)
    return mask.reshape(samples, heads, *mask.shape[1:]) if heads and len(mask.shape) == 3 else mask


def attention(embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
              add_zero_attn: bool = False, batch_first: bool = False) -> Fitted:
    module = nn.MultiHeadAttention(embed_dim, num_heads, dropout=dropout, bias=bias, bias_kv=add_bias_kv,
                                   zero_attention=add_zero_attn)

    def call(query: Any, key: Any, value: Any, key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None,
             average_attn_weights: bool = True, is_causal: bool = False) -> Any:
        swapped = not batch_first and len(query.shape) == 3
        query, key, value = (ops.swapaxes(x, 0, 1) if swapped else x for x in (query, key, value))
        samples = query.shape[0] if len(query.shape) == 3 else 1
        y, weights = module(query, looking(attn_mask, num_heads, samples), key, value, key_padding_mask, True)
        weights = ops.mean(weights, dim=-3) if average_attn_weights else weights
        return ops.swapaxes(y, 0, 1) if swapped else y, weights if need_weights else None
    return Fitted(module, call, renamed)


def transformer(make: Any) -> Any:
    """A layer or a whole transformer, whose arguments are PyTorch's but for the default of `batch_first`, and its functions."""
    def made(*args: Any, batch_first: bool = False, **kwargs: Any) -> Fitted:
        module = make(*(getattr(ops, arg.__name__) if callable(arg) else arg for arg in args), batch_first=batch_first, **kwargs)
        return Fitted(module, module, renamed)
    return made


def encoder(layer: Any, num_layers: int, norm: Any = None, enable_nested_tensor: bool = True, mask_check: bool = True) -> Fitted:
    ours = nn.TransformerEncoderLayer(layer.linear1.in_features, layer.self_attn.num_heads, layer.linear1.out_features,
                                      layer.dropout.p, layer.activation.__name__, layer.norm1.eps, layer.self_attn.batch_first,
                                      layer.norm_first, layer.linear1.bias is not None)
    module = nn.TransformerEncoder(ours, num_layers)
    return Fitted(module, module, renamed)


MAP: dict[str, Any] = {
    **{f"nn.{name}": getattr(nn, name) for name in f"{SAME} {CONVOLUTIONS} {PADS}".split()},
    **{f"nn.{name}": pool(name) for name in POOLS},
    "nn.MultiheadAttention": attention, "nn.TransformerEncoder": encoder,
    "nn.TransformerEncoderLayer": transformer(nn.TransformerEncoderLayer),
    "nn.TransformerDecoderLayer": transformer(nn.TransformerDecoderLayer),
    "nn.Transformer": transformer(nn.Transformer),
    "nn.GroupNorm": group_norm, "nn.LayerNorm": layer_norm, "nn.RMSNorm": rms_norm, "nn.Embedding": embedding,
}
