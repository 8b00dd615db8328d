"""What hook plugins share: how an experiment tracker is told of a run."""
