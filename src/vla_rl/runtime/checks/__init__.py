"""Checks of a spec: why a run is refused or warned of."""
