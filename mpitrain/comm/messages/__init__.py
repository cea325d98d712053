"""Collectives by messages: the interpreter of schedules over MPI, packing, and progress."""
