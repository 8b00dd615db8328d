"""The driver: one process, which sees workers only through `comm`."""
