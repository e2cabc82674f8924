"""Find a model's MLPs and blocks, and the stock config that describes a smaller model."""
