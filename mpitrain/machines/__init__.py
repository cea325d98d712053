"""Descriptions of machines for plans: what compute, memory and each level of the network cost, with their sources."""

from mpitrain.machines.machine import MachineFile, check_ranks, known_machines, load_machine, to_toml

__all__ = ["MachineFile", "check_ranks", "known_machines", "load_machine", "to_toml"]
