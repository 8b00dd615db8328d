"""Calls between processes: interfaces, handles, channels, shared memory, weights."""
