"""Plans of a run: every way to cut it that fits and that `train` accepts, timed on a described machine."""
