"""Collectives and pipelines as plain data: generators of steps, the checker that proves them, the simulator that times them.

Nothing here imports MPI, and only fitting a machine to measurements imports NumPy, so all of it works on a laptop
and on a login node.
"""
