"""The one place that says which version this is; a plain checkout knows it too."""

__version__ = "0.1.0"
