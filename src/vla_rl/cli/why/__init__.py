"""`vla-rl why`: why a run does not learn, in three stages of growing cost."""
