"""Change a model in place: `convert_`, `prune_` and `revert_`."""
