"""Changing a model's layers in place: injection, and the lean forward."""
