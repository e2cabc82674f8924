"""Learn a merge from data: train a model that starts from a merge, and compare the two."""
