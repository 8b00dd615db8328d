"""Samples of a step: what is trained on, and how it reaches the learners."""
