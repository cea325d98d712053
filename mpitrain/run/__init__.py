"""A run as an object: on any communicator, several in one process, one after another or side by side."""

from mpitrain.run.run import Run, Trained

__all__ = ["Run", "Trained"]
