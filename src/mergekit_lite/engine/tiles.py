"""Constants that kernels and their callers share."""

Kind = tuple[str, int]
"""An argument's dtype, as numpy's character code, and number of dimensions (0 for a scalar)."""

TILE = 2048
"""The number of elements that a kernel works on at a time, few enough to stay in cache."""

# which elements of a task vector are kept
ALL = 0  # every element
TRIM = 1  # magnitudes at or above one threshold
MIDDLE = 2  # magnitudes between two thresholds
DRAW = 3  # each element with the same probability
CHOSEN = 4  # elements whose bit in a mask is set

EVERY = -1
"""The budget of a block that keeps all elements equal to the threshold."""
