"""Learn a merge on data: a start, a student that is trained on it, and a table of both."""
