"""Searches for hyperparameters and architectures: trials on groups of ranks, samplers, pruners, a journal."""
