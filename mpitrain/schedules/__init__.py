"""Collectives and pipelines as plain data: generators of steps, and the checker that proves them before they run.

Nothing here imports MPI or NumPy, so all of it works on a laptop and on a login node.
"""
