"""Which worker has which role, lanes and device."""
