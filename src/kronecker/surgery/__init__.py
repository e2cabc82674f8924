"""Changing a model in place: which layers it has, and `convert_` and `revert_`."""
