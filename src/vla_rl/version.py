"""The version of this distribution. It imports nothing, because the build reads it and every layer may import it."""

__version__ = "0.1.0"
