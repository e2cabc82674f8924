"""Training back: the trainer, its groups of parameters, and schedules as callbacks."""
