"""Measurements that `mpitrain bench` makes: pairs of ours and MPI's own, alternately in one run, every result checked."""
