"""The eager path: autograd, and the products with low-rank factors."""
