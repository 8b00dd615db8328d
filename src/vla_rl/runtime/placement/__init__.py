"""Placement: role, lanes and device of each worker, and the components that run there."""
