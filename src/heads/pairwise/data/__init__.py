"""Read pairs from files and data sets, tokenize and batch them, and cache encoder features."""
