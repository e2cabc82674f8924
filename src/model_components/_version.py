"""The only definition of the library's version; it is available without installation."""

__version__ = "0.1.0"
