"""Scheduling of a rollout: which tickets run next, and which requests are inferred together."""
