"""Fit a model's blocks one after the other, on calibration data.

It is the best start known without training.
"""
