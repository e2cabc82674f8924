"""Judges: models that decide which of two answers to a prompt is better.

A judge is an encoder or a language model with a head. Swapping the answers swaps the probabilities
of A and B exactly, except with ``link="concat"``. Most encoders run without padding.

The types that functions return, and the definitions of links (functions from features to logits)
and losses, are in the submodules, such as ``heads.pairwise.functional``.
"""

from model_components._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
