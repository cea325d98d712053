"""Files on the disk: plain calls whose errors carry their place, and HDF5 files that are written by them."""
