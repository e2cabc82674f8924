"""Reports: the cost of an adapter, and what a trainer's log says."""
