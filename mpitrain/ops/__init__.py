"""Every differentiable operation, once. Inputs are tensors, arrays or numbers; results are tensors.

An op is here as soon as its file has its name in `__all__`. Importing this package attaches the operators (``x + y``, ``x[i]``,
``x.sum()``) to Tensor.
"""

from mpitrain.ops import operators
from mpitrain.ops.activation import *
from mpitrain.ops.attention import *
from mpitrain.ops.conv import *
from mpitrain.ops.conv_nd import *
from mpitrain.ops.dropout import *
from mpitrain.ops.elementwise import *
from mpitrain.ops.experts import *
from mpitrain.ops.index import *
from mpitrain.ops.layer_norm import *
from mpitrain.ops.linalg import *
from mpitrain.ops.loss import *
from mpitrain.ops.norm import *
from mpitrain.ops.pool import *
from mpitrain.ops.recurrent import *
from mpitrain.ops.reduce import *
from mpitrain.ops.shape import *

operators.attach()
