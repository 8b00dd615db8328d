"""Hosts of workers: this process, or Ray."""
