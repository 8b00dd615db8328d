"""What a run is refused for."""
