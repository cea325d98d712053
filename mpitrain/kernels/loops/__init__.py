"""Kernels as loops of Numba: the compiled version where there is no C compiler. Importing a module here imports Numba.

A loop is written once for float32 and float64. Literals would promote float32, so constants are made of the arrays' type
(``x.dtype.type(2)``), and functions of single numbers stand in `mathematics`, for each type.
"""

from mpitrain.kernels.kernel import prepare

prepare()
