"""Optimizers and learning-rate schedules."""

from mpitrain.optim.norm import clip_factor, squared_norm
from mpitrain.optim.optimizer import OPTIMIZERS, Optimizer, Segment
from mpitrain.optim.rules import LAMB, LARS, SGD, Adam, AdamW, RMSprop
from mpitrain.optim.schedule import SCHEDULES, schedule

__all__ = ["LAMB", "LARS", "OPTIMIZERS", "SCHEDULES", "SGD", "Adam", "AdamW", "Optimizer",
           "RMSprop", "Segment", "clip_factor", "schedule", "squared_norm"]
