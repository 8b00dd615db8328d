"""A run: what happens in which order, against a runtime that `runtime.py` declares."""
