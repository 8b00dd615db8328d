"""Reports of a run: its trace, its faults, and what the compiler does."""
