"""Tools to test your own layers: equivalence, ordinary torch behavior, operation counts.

- `check_equivalent` compares a fast function, and all of its gradients, with its definition in
  float64.
- `check_module` checks that a module can do everything that torch's own modules can do: copies,
  dtypes, second derivatives, `torch.func`, `torch.compile`, `torch.export`, optimizers and more.
- `count_operations` counts the torch operations and bytes of a call.

>>> from model_components.testing import check_module
>>> report = check_module(lambda: torch.nn.Linear(4, 3), torch.ones(6, 4), only=["deepcopied"])
>>> report.passed
('deepcopied',)
"""

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
