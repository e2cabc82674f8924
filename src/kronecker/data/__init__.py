"""Batches of a model's arguments for calibration, from texts or as they are given."""
