"""Rows of instructions, and whether packed rows stay apart."""
