"""Files of a run: the run folder, its lock, checkpoints and results."""
