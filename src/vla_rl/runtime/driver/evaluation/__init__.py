"""Evaluation, in a run and of a checkpoint."""
