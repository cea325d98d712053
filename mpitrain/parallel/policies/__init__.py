"""Policies of keeping and exchanging parameters: replicated, one copy per node, sharded."""
