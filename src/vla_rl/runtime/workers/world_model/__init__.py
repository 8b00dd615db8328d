"""The world model of a run, and the envs that it imagines."""
