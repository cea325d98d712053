"""Layers that several ranks compute together: tensor, context and expert parallelism."""
