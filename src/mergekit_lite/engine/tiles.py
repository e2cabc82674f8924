"""Constants that kernels and their callers share."""

Kind = tuple[str, int]
"""An argument's dtype as numpy's letter, and its number of dimensions (0 for a scalar)."""

TILE = 2048
"""Elements that a kernel works on at a time, few enough to stay in a core's nearest cache."""

# the elements of a task vector that are kept
ALL = 0  # every element
TRIM = 1  # magnitudes at or above one threshold
MIDDLE = 2  # magnitudes between two thresholds
DRAW = 3  # each element with one probability
CHOSEN = 4  # elements whose bit in a mask is set

EVERY = -1
"""The budget of a block that keeps all elements equal to the threshold."""
