r"""Search for the settings of a judge's head with Optuna (extra `search`), on a frozen encoder.

    python examples/search_judge.py --data pairs.jsonl --encoder models/encoder --trials 20

A judge is a model that predicts which of two answers is better. The encoder reads the answers once,
on the CPU, and each trial then takes between a few seconds and a minute. Trials are compared by
the log-loss on held-out prompts in their best epoch, and poor trials are stopped early.
OUT/search.db stores the trials: the same command continues where it was stopped. The best settings
are printed as flags of `model-components judge train`.
"""

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

import optuna
from name_a_thing import made_up, own_encoder
from transformers import TrainingArguments

from heads.pairwise import PairwiseModel, PairwiseTrainer, freeze_, read_pairs, split_pairs
from model_components import DeadRunError

INNER = [0, 32, 128]
LINKS = ["antisymmetric", "davidson"]


def searched(trial: optuna.Trial) -> dict[str, Any]:
    """Draw the model's settings for a trial."""
    return {
        "dropout": trial.suggest_float("dropout", 0.05, 0.6),
        "hidden_features": trial.suggest_categorical("hidden_features", INNER),
        "link": trial.suggest_categorical("link", LINKS),
    }


def rates(trial: optuna.Trial) -> dict[str, float]:
    """Draw the trainer's settings for a trial."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 2e-4, 5e-3, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-3, 0.3, log=True),
    }


def search(given: argparse.Namespace) -> dict[str, Any]:
    """Run the trials, and return the best settings."""
    pairs = read_pairs(given.data)[0] if given.data else made_up(600, seed=0)
    encoder = given.encoder or own_encoder(given.out)
    data: list[Any] = []
    has_ties = any(pair.label == 2 for pair in pairs)

    def new_model(trial: optuna.Trial | None = None) -> PairwiseModel:
        options = {} if trial is None else searched(trial)
        model = PairwiseModel.from_encoder(encoder, ties=has_ties, **options)
        freeze_(model, "all")
        if not data:
            data.extend(model.dataset(part) for part in split_pairs(pairs, (0.8, 0.2)))
        for one in data:
            one.encode_(model, cache=given.out / "features")
        return model

    new_model()
    arguments = TrainingArguments(
        str(given.out / "checkpoints"),
        num_train_epochs=given.epochs,
        per_device_train_batch_size=64,
        warmup_steps=0.1,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="no",
        metric_for_best_model="log_loss",
        greater_is_better=False,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = PairwiseTrainer(
        args=arguments,
        model_init=new_model,
        train_dataset=data[0],
        eval_dataset=data[1],
        head_lr_ratio=1.0,
    )
    # different pairs, epochs or encoders get separate studies
    name = hashlib.sha256(repr((str(encoder), given.epochs, pairs)).encode()).hexdigest()[:16]
    place = {
        "storage": f"sqlite:///{given.out / 'search.db'}",
        "study_name": name,
        "load_if_exists": True,
    }
    study = optuna.create_study(direction="minimize", **place)
    whole = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    done = len(study.get_trials(states=whole))
    print(f"{done} of {given.trials} trials have been run")

    def best_epoch(metrics: dict[str, float]) -> float:
        earlier = trainer.state.best_metric
        return min(metrics["eval_log_loss"], float("inf") if earlier is None else earlier)

    if done < given.trials:
        trainer.hyperparameter_search(
            rates,
            best_epoch,
            n_trials=given.trials - done,
            backend="optuna",
            catch=(DeadRunError,),
            # with a fixed seed, each run would draw the settings of the first run again
            sampler=optuna.samplers.TPESampler(seed=len(study.trials)),
            pruner=optuna.pruners.MedianPruner(n_warmup_steps=2),
            **place,
        )
    print(f"lowest log-loss: {study.best_value:.4f}")
    return study.best_params


def main() -> None:
    """Search for the best settings, and print them as flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="labeled pairs: a file or a hub id; default: made-up pairs")
    parser.add_argument("--encoder", help="a folder or a hub id; default: a small random encoder")
    parser.add_argument(
        "--trials", type=int, default=20, help="number of trials, including earlier runs"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/search"))
    parser.add_argument(
        "--smoke", action="store_true", help="run for a few seconds, to test the script"
    )
    given = parser.parse_args()
    if min(given.trials, given.epochs) < 1:
        parser.error("expected --trials and --epochs of 1 or more")
    if given.smoke:
        given.trials, given.epochs = min(given.trials, 3), 2
    given.out.mkdir(parents=True, exist_ok=True)
    flags = []
    for name, value in search(given).items():
        told = f"{value:.3g}" if isinstance(value, float) else value
        flags.append(f"--{name.replace('_', '-')} {told}")
    print("best: " + " ".join(flags))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command continues after the last complete trial")
    except (OSError, ValueError) as error:
        sys.exit(f"search_judge: {error}")
