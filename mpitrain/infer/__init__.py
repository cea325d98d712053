"""A trained model at work: predictions, text, a server to try it."""
