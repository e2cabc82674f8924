"""What calibration reads: batches of a model's arguments, from texts or as they are given."""
