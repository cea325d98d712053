"""MPI: starting it, the mesh of ranks, channels that carry collectives, progress, and the guard that ends a failed job.

Importing any module here starts no MPI; `start.start()` does.
"""
