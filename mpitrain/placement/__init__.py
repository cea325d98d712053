"""Where everything of a model lies on a mesh, worked out without MPI."""
