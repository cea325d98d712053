"""Modules, layers, initialisers, losses, and the flat storage parameters live in: what each file lists in its `__all__`."""

from mpitrain.nn import init as init
from mpitrain.nn.activation import *
from mpitrain.nn.attention import *
from mpitrain.nn.basic import *
from mpitrain.nn.cells import *
from mpitrain.nn.conv import *
from mpitrain.nn.loss import *
from mpitrain.nn.module import *
from mpitrain.nn.moe import *
from mpitrain.nn.norm import *
from mpitrain.nn.packed import *
from mpitrain.nn.parameter import *
from mpitrain.nn.recurrent import *
from mpitrain.nn.sequential import *
from mpitrain.nn.statistics import *
from mpitrain.nn.storage import *
