"""Changing a model in place: which layers it has, `convert_`, `prune_` and `revert_`."""
