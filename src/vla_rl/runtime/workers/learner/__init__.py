"""Learners: gradients, the optimiser, scores of samples."""
