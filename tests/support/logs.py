"""What trainings logged, without what differs from run to run."""

_OF_THE_CLOCK = (
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "eval_runtime",
    "eval_samples_per_second",
    "eval_steps_per_second",
    "total_flos",  # which the stock trainer counts per call of train
)


def logs_of(trainer):
    """Return a trainer's log without times."""
    return [
        {name: value for name, value in row.items() if name not in _OF_THE_CLOCK}
        for row in trainer.state.log_history
    ]
