"""Models of other frameworks in, ours out: file formats and the names of arrays in them."""
