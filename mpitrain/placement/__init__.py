"""The placement of a model on a mesh, worked out without MPI."""
