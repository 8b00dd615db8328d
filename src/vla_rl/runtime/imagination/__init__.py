"""Training in imagination: a part of the training step, and the roles that it adds to workers."""
