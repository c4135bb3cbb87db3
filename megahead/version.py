"""The version, for whoever must say it."""

__version__ = "0.1.0"
