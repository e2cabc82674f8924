"""`SavedJudge`: a judge that is saved with its tokenizer and a model card."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from model_components._folders import make_folder, new_file, temporary_folder
from model_components._formats import reading
from model_components._hub import hub_id
from model_components._model_folders import CARD, card_of, push_to_hub

from .checks import most_tokens
from .config import PairwiseConfig
from .judge import Judge
from .packing import check_packing

# options for finding files, which are also passed to the tokenizer
_FROM_HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "trust_remote_code")


class SavedJudge(Judge):
    """The part of `PairwiseModel` that saves, loads and uploads judges."""

    @classmethod
    def from_pretrained(cls, place: str | os.PathLike[str], *args: object, **kwargs: Any) -> Any:
        """Load a model that `save_pretrained` wrote, with its tokenizer.

        The model is float32 unless ``dtype`` is given.
        """
        if "torch_dtype" not in kwargs:
            kwargs.setdefault("dtype", torch.float32)
        with reading(place, "from_pretrained"):
            loaded = super().from_pretrained(place, *args, **kwargs)
        model: Any = loaded[0] if isinstance(loaded, tuple) else loaded
        # the model was built on the meta device, so packing could not be tested before
        model.packing = check_packing(model.encoder)
        try:
            hub_options = {name: value for name, value in kwargs.items() if name in _FROM_HUB}
            model.tokenizer = AutoTokenizer.from_pretrained(place, **hub_options)
        except Exception as error:  # a damaged file may raise anything
            folder = Path(str(place)) / kwargs.get("subfolder", "")
            if any(
                (folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")
            ):
                raise ValueError(
                    f"from_pretrained: the tokenizer in {place} cannot be read: {error}"
                ) from error
            model.tokenizer = None  # the model was saved without a tokenizer
        # only for the check: an edited config may ask for more positions than there are
        most_tokens(
            "from_pretrained",
            model.config.max_tokens,
            model.encoder,
            model.packing,
            model.tokenizer,
        )
        return loaded

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        *args: Any,
        report: object = None,
        **kwargs: object,
    ) -> None:
        """Write the config, weights (safetensors), a model card and, if any, the tokenizer.

        Args:
            save_directory: The output folder; it is created if it does not exist.
            is_main_process: Whether this process writes the files.
            *args: Passed on to transformers.
            report: A `PairwiseReport` for the model card, README.md. If it is given, an existing
                card is replaced; otherwise, a card is written only if there is none.
            **kwargs: Passed on to transformers.

        Raises:
            ValueError: ``push_to_hub`` is set, which would not upload the card and the tokenizer;
                ``save_directory`` is a file; or the card's path is a link or a folder.
        """
        if kwargs.get("push_to_hub"):
            raise ValueError(
                "save_pretrained: push_to_hub would not upload the card and the tokenizer; call "
                "model.push_to_hub(repo_id, report=report) instead"
            )
        # the layers of peft and of heads.lora have this attribute
        if any(hasattr(module, "lora_A") for module in self.encoder.modules()):
            warnings.warn(
                "save_pretrained: the encoder has adapters, which from_pretrained cannot load; "
                "merge them first: model.encoder = model.encoder.merge_and_unload()",
                stacklevel=2,
            )
        if is_main_process:
            folder = make_folder(save_directory, "save_pretrained")
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
            # use lexists, because the user may have made a link on purpose, even if it is broken
            if report is not None or not os.path.lexists(folder / CARD):
                with new_file(folder / CARD, "save_pretrained") as part:
                    part.write_text(judge_card(self.config, report), encoding="utf-8")
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    def push_to_hub(  # pyrefly: ignore[bad-override]
        self, repo_id: str, *, report: object = None, **options: Any
    ) -> str:
        """Upload the model to a repository on the hub, with all files of `save_pretrained`.

        Args:
            repo_id: The repository, ``owner/name``; it is created if it does not exist.
            report: A `PairwiseReport` for the model card.
            **options: Options of `model_components.push_to_hub`, such as ``private``.

        Returns:
            The URL of the commit.
        """
        with temporary_folder() as folder:
            self.save_pretrained(folder, report=report)
            return push_to_hub(folder, repo_id, **options)


def judge_card(config: PairwiseConfig, report: Any = None) -> str:
    """Return the model card of a judge, without local paths."""
    encoder: Any = config.encoder
    base = getattr(encoder, "_name_or_path", "") or ""
    if config.link == "concat":
        purpose = (
            "Decides which of two answers to a prompt is better; the verdict can depend on which "
            "is called A."
        )
    else:
        purpose = (
            "Decides which of two answers to a prompt is better, or that they tie. The same answer "
            "wins if the two are swapped."
        )
    length = f"at most {config.max_tokens} tokens" if config.max_tokens else "texts of any length"
    parts = [
        purpose,
        "```python\nfrom heads.pairwise import PairwiseModel  # pip install model-components\n\n"
        'judge = PairwiseModel.from_pretrained("this folder or repository")\n'
        'print(judge.predict(["Name a tool."], ["An axe."], ["No idea."]).probabilities)\n```',
        f"Link {config.link}, pooling {' + '.join(config.pooling)}, surface features "
        f"{', '.join(config.surface) or 'none'}; {length}.",
    ]
    head: dict[str, Any] = {"pipeline_tag": "text-ranking"}
    if report is not None:
        judged = report.metrics
        named = {
            "accuracy": judged.accuracy,
            "log_loss": judged.log_loss,
            "calibration_error": judged.calibration_error,
        }
        metrics = [{"type": name, "value": round(float(value), 4)} for name, value in named.items()]
        where = {"name": f"{len(report.labels)} labeled pairs", "type": "pairs"}
        results = {"task": {"type": "text-ranking"}, "dataset": where, "metrics": metrics}
        head["model-index"] = [{"name": "judge", "results": [results]}]
        parts += ["## Evaluation", f"```text\n{report}\n```"]
    title = f"A judge based on {hub_id(base) or encoder.model_type}"
    tags = ["pairwise", "preference-model"]
    return card_of(title, parts, bases=[base], tags=tags, **head)
