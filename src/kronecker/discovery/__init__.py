"""Find what a model is made of: its MLPs, its blocks, and the stock model that fits."""
