"""Collecting: from tickets to the rollout of a step."""
