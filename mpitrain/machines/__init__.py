"""Descriptions of machines for plans: what compute, memory and each level of the network cost, with their sources."""
