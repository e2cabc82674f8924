"""Reports on the cost of an adapter, on a trainer's log, and on runs."""
