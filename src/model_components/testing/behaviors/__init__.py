"""Behaviors of torch's own modules, one function each."""
