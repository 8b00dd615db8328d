"""A run: the order of its phases, against a runtime that `runtime.py` declares."""
