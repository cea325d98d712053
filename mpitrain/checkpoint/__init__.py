"""Checkpoints and the run folder: their content, its verification, and how a run continues from it."""
