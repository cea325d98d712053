"""Published scaling curves beside what the step model predicts for them."""
