"""Attention by blocks of float32 whose products round their factors to bfloat16 first; softmax, sums and results stay float32.

A query's bits depend on its own numbers and those it sees alone, on every CPU with the instruction; see
native/flash_attention_bfloat16.c, also for what becomes of numbers below 2^-126.
"""

from __future__ import annotations

from functools import partial

from mpitrain.kernels.blocked_attention import EXPRESSIONS, backward, forward
from mpitrain.kernels.flash_attention import BACKWARD, FORWARD, gradient_in_numba, in_numba, run_backward, run_forward
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import host
from mpitrain.kernels.product import rounded

LIBRARY = "flash_attention_bfloat16"
ROUNDED = EXPRESSIONS._replace(factor=rounded)

flash_attention_bfloat16 = Kernel(
    "flash_attention_bfloat16", partial(forward, ROUNDED),
    host(LIBRARY, "forward_bfloat16", FORWARD.replace("X", "F"))(partial(run_forward, LIBRARY)),
    in_numba(LIBRARY, "ROUNDED"))
"""As `flash_attention`, of float32."""

flash_attention_grad_bfloat16 = Kernel(
    "flash_attention_grad_bfloat16", partial(backward, ROUNDED),
    host(LIBRARY, "backward_bfloat16", BACKWARD.replace("X", "F"))(partial(run_backward, LIBRARY)),
    gradient_in_numba(LIBRARY, "ROUNDED"))
"""As `flash_attention_grad`, of float32."""
