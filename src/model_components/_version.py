"""The version of the library, defined only here, so that it needs no installation."""

__version__ = "0.1.0"
