"""Whether a model fits the data that it is to be trained on."""

from __future__ import annotations

from .checks import check_plan
from .curriculum import CurriculumDataset
from .flow import FlowPlan
from .model import LatentThinker


def check_fit(model: LatentThinker, data: CurriculumDataset, plan: FlowPlan) -> None:
    """Refuse a model whose sizes, latents or plan the data do not suit."""
    config = model.config
    if config.causal:
        raise ValueError(
            "ThinkerTrainer: a causal flow answers at its own tokens, tasks ask for an answer of their own; needed "
            "causal=False, or transformers.Trainer with labels"
        )
    for name, needed in data.sizes().items():
        has = getattr(config, name)
        if needed > has:
            raise ValueError(
                f"ThinkerTrainer: the model's {name} is {has}; {type(data.task).__name__} up to length "
                f"{data.schedule.max_length} needed {needed}"
            )
    if data.n_latent is not None and config.latent_init == "table" and data.n_latent[1] > config.num_latents:
        raise ValueError(
            f"ThinkerTrainer: the data set draws up to {data.n_latent[1]} latents, the model's table has "
            f'{config.num_latents}; needed at most as many, or latent_init="noise"'
        )
    check_plan(config, plan.rows())
