"""Simulators: episodes, rewards, recordings."""
