"""Calibration batches, made from texts or from a model's arguments."""
