"""Numbers that kernels and their callers share."""

Kind = tuple[str, int]
"""An argument's dtype, by numpy's letter, and its number of dimensions, 0 for a number."""

TILE = 2048
"""Elements that a kernel works on at a time, which stay in a core's nearest cache."""

ALL, TRIM, MIDDLE, DRAW, CHOSEN = range(5)
"""What is kept of a task vector: all, what lies above one cut or between two, what a probability
or a mask says."""

EVERY = -1
"""Of elements that equal a threshold: all are kept."""
SPENT = -2
"""Of elements that equal a threshold: a block's share of them is used up."""
