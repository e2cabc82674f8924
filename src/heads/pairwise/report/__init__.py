"""Measures of verdicts, and of rivals that need no encoder."""
