"""Observers of a run: objects told of each step, evaluation and checkpoint, that write, show, measure or choose."""

from mpitrain.train.observers.observer import Observer, Watched

__all__ = ["Observer", "Watched"]
