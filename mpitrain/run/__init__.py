"""A run as an object: on any communicator, several in one process, one after another or side by side."""

from mpitrain.run.run import Evaluated, Run, Trained

__all__ = ["Evaluated", "Run", "Trained"]
