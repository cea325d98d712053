"""Modules, layers, initialisers, losses, and the flat storage parameters live in."""

from mpitrain.nn import init
from mpitrain.nn.activation import ACTIVATIONS, GELU, LeakyReLU, ReLU, Sigmoid, SiLU, Softmax, Softplus, Tanh
from mpitrain.nn.attention import MultiHeadAttention
from mpitrain.nn.basic import Dropout, DropoutAdd, Embedding, Flatten, Linear
from mpitrain.nn.conv import Conv2d, ConvTranspose2d
from mpitrain.nn.loss import LOSSES, Loss
from mpitrain.nn.module import Module
from mpitrain.nn.moe import MixtureOfExperts, mixtures
from mpitrain.nn.norm import BatchNorm1d, BatchNorm2d, GroupNorm, LayerNorm, RMSNorm, SyncBatchNorm
from mpitrain.nn.parameter import Buffer, Parameter
from mpitrain.nn.pool import AdaptiveAvgPool2d, AdaptiveMaxPool2d, AvgPool2d, MaxPool2d
from mpitrain.nn.recurrent import GRU, LSTM
from mpitrain.nn.sequential import Sequential
from mpitrain.nn.statistics import apply_statistics, collect_statistics, running_layers
from mpitrain.nn.storage import FlatLayout, FlatStorage, Segment, plan_segments

__all__ = ["ACTIVATIONS", "GELU", "GRU", "LOSSES", "LSTM", "AdaptiveAvgPool2d", "AdaptiveMaxPool2d", "AvgPool2d", "BatchNorm1d",
           "BatchNorm2d", "Buffer", "Conv2d", "ConvTranspose2d", "Dropout", "DropoutAdd", "Embedding", "FlatLayout",
           "FlatStorage", "Flatten", "GroupNorm", "LayerNorm", "LeakyReLU", "Linear", "Loss", "MaxPool2d", "MixtureOfExperts",
           "Module", "MultiHeadAttention", "Parameter", "RMSNorm", "ReLU", "Segment", "Sequential", "SiLU", "Sigmoid",
           "Softmax", "Softplus", "SyncBatchNorm", "Tanh", "apply_statistics", "collect_statistics", "init", "mixtures",
           "plan_segments", "running_layers"]
