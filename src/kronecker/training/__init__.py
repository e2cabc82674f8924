"""Train smaller models: the trainer, its parameter groups, and schedules as callbacks."""
