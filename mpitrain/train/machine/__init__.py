"""The machine of a run: versions, threads, the numerics that bits depend on."""
