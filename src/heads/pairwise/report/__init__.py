"""Metrics of verdicts, and baselines that need no encoder."""
