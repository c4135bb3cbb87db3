"""Training: a run from its config to its end."""
