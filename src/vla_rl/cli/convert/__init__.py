"""`vla-rl convert`: configurations of other projects as specs."""
