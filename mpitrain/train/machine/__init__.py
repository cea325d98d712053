"""The machine a run is on: versions, threads, the numerics that bits depend on."""
