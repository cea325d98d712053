"""Collectives through memory that the ranks of a node share."""
