"""Metrics of verdicts, reports on them, and baselines that need no encoder."""
