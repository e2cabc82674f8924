"""Numbers that kernels and their callers share."""

Kind = tuple[str, int]
"""An argument's dtype, by numpy's letter, and its number of dimensions, 0 for a number."""

TILE = 2048
"""Elements that a kernel works on at a time, which stay in a core's nearest cache."""

# what is kept of a task vector
ALL = 0  # every element
TRIM = 1  # magnitudes at or above one threshold
MIDDLE = 2  # magnitudes between two thresholds
DRAW = 3  # each element with one probability
CHOSEN = 4  # elements whose bit in a mask is set

EVERY = -1
"""In place of a number of elements that equal a threshold: all of them are kept."""
