"""Find a model's MLPs and blocks, and the stock config of a smaller model."""
