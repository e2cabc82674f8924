"""The eager implementation: its autograd function, and products with low-rank factors."""
