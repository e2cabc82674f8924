"""`SavedJudge`: a model that is kept with its tokenizer and a card of its verdicts' worth."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer

from model_components._folders import make_folder, new_file
from model_components._hub import hub_id, upload

from .checks import most_tokens
from .config import PairwiseConfig
from .judge import Judge
from .packing import check_packing

_CARD = "README.md"
_FROM_HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "trust_remote_code")


class SavedJudge(Judge):
    """The part of `PairwiseModel` that has to do with files."""

    @classmethod
    def from_pretrained(cls, place: str | os.PathLike[str], *args: object, **kwargs: Any) -> Any:
        """Load a model that `save_pretrained` wrote, with its tokenizer.

        It is in float32 unless ``dtype`` says otherwise.
        """
        if "torch_dtype" not in kwargs:
            kwargs.setdefault("dtype", torch.float32)
        loaded = super().from_pretrained(place, *args, **kwargs)
        model: Any = loaded[0] if isinstance(loaded, tuple) else loaded
        model.packing = check_packing(model.encoder)
        try:
            hub_options = {name: value for name, value in kwargs.items() if name in _FROM_HUB}
            model.tokenizer = AutoTokenizer.from_pretrained(place, **hub_options)
        except Exception as error:  # whatever a damaged file gives
            if any(
                (Path(str(place)) / name).exists()
                for name in ("tokenizer.json", "tokenizer_config.json")
            ):
                raise ValueError(
                    f"from_pretrained: the tokenizer in {place} cannot be read: {error}"
                ) from error
            model.tokenizer = None  # it was saved without one
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
        """Config, safetensors, a card and, where the model has one, the tokenizer.

        Args:
            save_directory: Made if there is none.
            is_main_process: Write from this process.
            *args: Of transformers.
            report: A `PairwiseReport` for the card, README.md, which replaces the one that is
                there. Without it a card is written only where there is none.
            **kwargs: Of transformers.

        Raises:
            ValueError: ``push_to_hub``, which would leave card and tokenizer behind; a file, or a
                link or a folder with the card's name, is in the way.
        """
        if kwargs.get("push_to_hub"):
            raise ValueError(
                "save_pretrained: push_to_hub is set; expected model.push_to_hub(repo_id, "
                "report=report)"
            )
        if is_main_process:
            folder = make_folder(save_directory, "save_pretrained")
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
            if report is not None or not os.path.lexists(folder / _CARD):
                with new_file(folder / _CARD, "save_pretrained") as part:
                    part.write_text(card_of(self.config, report), encoding="utf-8")
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    def push_to_hub(  # pyrefly: ignore[bad-override]
        self,
        repo_id: str,
        *,
        report: object = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        commit_message: str | None = None,
    ) -> str:
        """Upload what `save_pretrained` writes, as a repository of the hub.

        Args:
            repo_id: Made if there is none.
            report: A `PairwiseReport` for the card.
            private: Whether a new repository is.
            token: Of the hub; None for the saved one.
            revision: A branch.
            create_pr: Propose the commit.
            commit_message: Default says what uploaded it.

        Returns:
            The commit's address.
        """

        def save(folder: Path) -> None:
            self.save_pretrained(folder, report=report)

        return upload(
            save,
            repo_id,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message,
        )


def card_of(config: PairwiseConfig, report: Any = None) -> str:
    """A README for a judge; it names no folder of this machine."""
    encoder: Any = config.encoder
    base = hub_id(getattr(encoder, "_name_or_path", "") or "")
    head: dict[str, object] = {
        "library_name": "transformers",
        "pipeline_tag": "text-ranking",
        "tags": ["model-components", "pairwise", "preference-model"],
    }
    if base is not None:
        head |= {"base_model": base}
    lines = [
        f"# A judge on {base or encoder.model_type}",
        "Which of two answers to a prompt is better, or that they tie: the same verdict, whichever "
        "is called A."
        if config.link != "concat"
        else (
            "Which of two answers to a prompt is better; the verdict can depend on which is called "
            "A."
        ),
        "```python\nfrom heads.pairwise import PairwiseModel  # pip install model-components\n\n"
        'judge = PairwiseModel.from_pretrained("this folder or repository")\n'
        'print(judge.predict(["Name a tool."], ["An axe."], ["No idea."]).probabilities)\n```',
        f"Link {config.link}, pooling {' + '.join(config.pooling)}, beside the encoder "
        f"{', '.join(config.surface) or 'nothing'}; {config.max_tokens or 'any number of'} tokens "
        "at most.",
    ]
    if report is not None:
        judged = report.metrics
        named = {
            "accuracy": judged.accuracy,
            "log_loss": judged.log_loss,
            "calibration_error": judged.calibration_error,
        }
        metrics = [{"type": name, "value": round(float(value), 4)} for name, value in named.items()]
        where = {"name": f"{len(report.labels)} labelled pairs", "type": "pairs"}
        head["model-index"] = [
            {
                "name": "judge",
                "results": [
                    {"task": {"type": "text-ranking"}, "dataset": where, "metrics": metrics}
                ],
            }
        ]
        lines += ["## What its verdicts are worth", f"```text\n{report}\n```"]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n" + "\n\n".join(lines) + "\n"
