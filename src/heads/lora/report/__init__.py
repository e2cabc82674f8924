"""Reports on the cost of adapters, on a trainer's log, and on runs of `tune` and `sweep`."""
