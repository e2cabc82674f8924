"""Modules that hold smaller weights in a dense layer's place."""
