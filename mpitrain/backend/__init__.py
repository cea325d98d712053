"""Arrays: the NumPy/CuPy namespace, devices, dtypes, counter-based random numbers, the loader of native code."""

from mpitrain.backend.classes import NO_CLASS, class_of_rows
from mpitrain.backend.dtype import compute_dtype, float_dtype, is_float, is_half
from mpitrain.backend.memory import keep_freed_memory, use_pool
from mpitrain.backend.namespace import CPU, Array, Device, array_module, asnumpy, constant, is_array, overwrite, select_device
from mpitrain.backend.random import stream_key

__all__ = ["CPU", "NO_CLASS", "Array", "Device", "array_module", "asnumpy", "class_of_rows", "compute_dtype", "constant",
           "float_dtype", "is_array", "is_float", "is_half", "keep_freed_memory", "overwrite", "select_device", "stream_key",
           "use_pool"]
