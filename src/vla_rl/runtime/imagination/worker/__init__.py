"""Roles of training in imagination: the world model, its imagined envs, and recordings of real episodes."""
