"""The best start known without training: a model's blocks one after the other, fitted on calibration data."""
