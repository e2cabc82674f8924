"""The trainer, its parameter groups, and a guard that stops runs that learn nothing."""
