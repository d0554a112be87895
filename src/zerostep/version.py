"""The version of this package, in the one place that everything reads it from."""

__version__ = "0.2.0.dev0"
