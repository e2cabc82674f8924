"""Calibration batches, from texts or from given arguments of a model."""
