"""Layers that several ranks have together: tensor parallelism, context parallelism, expert parallelism."""
