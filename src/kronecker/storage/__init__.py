"""Compressed models on disk."""
