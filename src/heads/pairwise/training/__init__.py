"""The trainer, its groups of parameters, and a guard against dead runs."""
