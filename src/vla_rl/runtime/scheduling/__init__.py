"""Which tickets are rolled out next, and which requests are inferred together."""
