"""Training: updates of the weights, and behaviour cloning."""
