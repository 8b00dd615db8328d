"""Reward models: a small success classifier, its folder, and its training from recordings."""
