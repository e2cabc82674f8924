"""Whether a model fits the data that it is to be trained on."""

from __future__ import annotations

from ..checks import check_plan
from ..curriculum import CurriculumDataset
from ..flow import FlowPlan
from ..model import LatentThinker
from ..tasks import AtTokens


def check_fit(model: LatentThinker, data: CurriculumDataset, plan: FlowPlan) -> None:
    """Refuse a model whose sizes, latents or plan the data do not suit."""
    config = model.config
    if config.at_tokens != isinstance(data.task, AtTokens):
        has = 'latent_init="tokens"' if config.at_tokens else f"latent_init={config.latent_init!r}"
        needed = "AtTokens(task)" if config.at_tokens else 'a plain task, or a model with latent_init="tokens"'
        raise ValueError(f"ThinkerTrainer: the model has {has}, the task is {data.task!r}; needed {needed}")
    for name, needed in data.sizes().items():
        has = getattr(config, name)
        if needed > has:
            raise ValueError(
                f"ThinkerTrainer: the model's {name} is {has}; {type(data.task).__name__} up to length "
                f"{data.schedule.max_length} needed {needed}"
            )
    if data.most_latents is not None and data.most_latents > (config.table_size or data.most_latents):
        raise ValueError(
            f"ThinkerTrainer: the data set draws up to {data.most_latents} latents, the model's table has "
            f'{config.table_size}; needed at most as many, or latent_init="noise"'
        )
    check_plan(config, plan.rows())
