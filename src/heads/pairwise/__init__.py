"""A head that says which of two answers is better, exactly fair and without a wasted token.

It sits on an encoder or a language model.

What functions return, and the definitions of links and losses, are in the modules:
``heads.pairwise.functional``, ...
"""

from model_components._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
