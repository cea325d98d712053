"""From a gradient that is final to the sum over ranks: buckets, norms, statistics."""
