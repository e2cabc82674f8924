"""Judges: models that decide which of two answers to a prompt is better.

A judge is an encoder or a language model with a head. Swapping the answers swaps its probabilities
exactly, except with ``link="concat"``, and most encoders run without padding.

The types that functions return, and the definitions of links and losses, are in the modules, such
as ``heads.pairwise.functional``.
"""

from model_components._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
