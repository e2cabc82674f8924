"""The paths that torch alone runs."""
