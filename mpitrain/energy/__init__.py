"""Joules: counters of processors and GPUs, their shares by phase, carbon, and the knobs that save some."""
