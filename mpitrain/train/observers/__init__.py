"""Observers of the training loop: logging, profile, metrics."""
