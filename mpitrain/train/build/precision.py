"""`train.precision = "bfloat16"`: used if it is faster, refused if it would only be slower.

Parameters, gradients, optimizer state, activations, messages and checkpoints are float32; the operands of the products of linear
layers, convolutions and attention (forward and all gradients) are rounded to bfloat16 on their way into the CPU's instruction,
and summed in float32. Softmax, attention with a mask and depthwise convolutions stay float32.
"""

from __future__ import annotations

from mpitrain.backend import native
from mpitrain.backend.cpu import cpu_flags, cpu_info
from mpitrain.errors import ConfigError
from mpitrain.kernels.product import has_bfloat16_instruction, one_thread

MODE = 'train.precision = "bfloat16"'
FLAG = "avx512_bf16"


def refuse(precision: str) -> None:
    """ConfigError if `precision` is "bfloat16" and this CPU would only be slower with it, or cannot do it."""
    if precision != "bfloat16":
        return
    if FLAG not in cpu_flags():
        name = cpu_info().get("model name", "this CPU")
        raise ConfigError(f"{MODE} would only be slower here: {name} has no instruction that multiplies such numbers (no "
                          f'{FLAG} in /proc/cpuinfo); set train.precision = "float32"')
    if not has_bfloat16_instruction():
        why = native.missing().get("product_bfloat16", "the compiler does not know them")
        cure = f"unset {native.VARIABLE}" if native.wanted() in ("numba", "numpy") else "install one"
        raise ConfigError(f"{MODE} needs a C compiler that makes the CPU's {FLAG} instructions, such as GCC 10 or newer: {why}; "
                          f'{cure}, or set train.precision = "float32"')
    if not one_thread():
        raise ConfigError(f"{MODE} computes on one thread a rank, where float32 has several here; set OMP_NUM_THREADS=1 and "
                          'start a rank per core, or set train.precision = "float32"')
