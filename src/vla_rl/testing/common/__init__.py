"""What all checks share."""
