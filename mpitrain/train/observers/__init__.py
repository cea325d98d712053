"""Observers of a run: what is told of each step, evaluation and checkpoint, and writes, shows, measures or chooses something."""

from mpitrain.train.observers.observer import Observer, Watched

__all__ = ["Observer", "Watched"]
