"""Checkpoints and the run folder: what is written, how it is verified, and how a run goes on from it."""
