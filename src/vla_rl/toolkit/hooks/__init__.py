"""Shared parts of hook plugins: how an experiment tracker receives a run."""
