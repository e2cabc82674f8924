r"""Search for the settings of a judge by Optuna (extra `search`), and train it with the best.

The search looks at validation pairs.

    python examples/search_judge.py --trials 20 --data pairs.jsonl \
        --encoder models/SmolLM2-135M-Instruct --depth 20

Flags are those of train_judge.py. Searched for are --lr, --weight-decay, --dropout, --hidden,
--link and --pooling; what is given for them is the first trial. Trials are compared by their best
epoch's log-loss of the validation pairs, and poor ones are cut short. OUT/search.db holds them: the
same command goes on where it was stopped, and with more --trials goes further. With a frozen
encoder, answers are read once for each pooling and a trial takes a minute.
"""

import argparse
import copy
import hashlib
import sys
from typing import Any

import optuna
import train_judge
from optuna.trial import TrialState

from heads.pairwise import PairwiseModel
from model_components import DeadRunError

POOLING = ["mean", "last", "mean last"]
LINKS = ["antisymmetric", "davidson"]
INNER = [0, 32, 128]
WHOLE = (TrialState.COMPLETE, TrialState.PRUNED)


def first_trial(given: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, as far as they are searched for."""
    made = {
        "learning_rate": train_judge.rate_of(given),
        "weight_decay": given.weight_decay,
        "dropout": given.dropout,
        "link": given.link,
    }
    return made | {"pooling": " ".join(given.pooling), "hidden": given.hidden}


def rates(trial: optuna.Trial, given: argparse.Namespace) -> dict[str, float]:
    """Settings of the trainer's."""
    middle = first_trial(given)["learning_rate"]
    return {
        "learning_rate": trial.suggest_float("learning_rate", middle / 5, middle * 5, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-3, 0.3, log=True),
    }


def settled(given: argparse.Namespace, trial: optuna.trial.BaseTrial) -> argparse.Namespace:
    """The flags with a trial's settings."""
    made = copy.copy(given)
    made.dropout = trial.suggest_float("dropout", 0.05, 0.6)
    made.hidden = trial.suggest_categorical("hidden", sorted({*INNER, given.hidden}))
    made.link = trial.suggest_categorical("link", sorted({*LINKS, given.link}))
    made.pooling = trial.suggest_categorical(
        "pooling", sorted({*POOLING, " ".join(given.pooling)})
    ).split()
    return made


def study_of(given: argparse.Namespace, parts: list[list]) -> tuple[optuna.Study, dict[str, Any]]:
    """The study of these pairs and these flags, in OUT/search.db, and what finds it."""
    flags = {
        name: value for name, value in vars(given).items() if name not in train_judge.MAY_CHANGE
    }
    name = hashlib.sha256(repr((sorted(flags.items()), parts)).encode()).hexdigest()[:16]
    given.out.mkdir(parents=True, exist_ok=True)
    place = {
        "storage": f"sqlite:///{given.out / 'search.db'}",
        "study_name": name,
        "load_if_exists": True,
        "direction": "minimize",
        "pruner": optuna.pruners.MedianPruner(n_warmup_steps=2),
    }
    study = optuna.create_study(**place)
    for trial in study.get_trials(states=[TrialState.RUNNING]):  # of a run that was killed
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.params)
    if not study.get_trials(states=(*WHOLE, TrialState.WAITING)):
        study.enqueue_trial(first_trial(given))
    # the seed alone would draw again what earlier runs have tried
    drawn = given.seed + len(study.trials)
    return study, place | {"sampler": optuna.samplers.TPESampler(seed=drawn)}


def search(given: argparse.Namespace) -> argparse.Namespace:
    """The flags with the best settings."""
    encoder, parts, _, data = train_judge.prepared(given, True)

    def new_model(trial: optuna.Trial | None = None) -> PairwiseModel:
        own = given if trial is None else settled(given, trial)
        model = train_judge.model_of(own, parts, encoder, False)
        if given.freeze == "all":
            for one in data:
                one.encode_(model, cache=given.out / "features")
        return model

    trainer = train_judge.trainer_of(given, data, keep=False, model_init=new_model)
    study, place = study_of(given, parts)
    done = len(study.get_trials(states=WHOLE))
    print(f"{done} of {given.trials} trials are there")
    if done < given.trials:

        def best_so_far(metrics: dict[str, float]) -> float:
            held = trainer.state.best_metric  # of the epochs before this one
            return min(metrics["eval_log_loss"], float("inf") if held is None else held)

        trainer.hyperparameter_search(
            lambda trial: rates(trial, given),
            best_so_far,
            n_trials=given.trials - done,
            backend="optuna",
            catch=(DeadRunError,),
            **place,
        )
    for trial in sorted(study.get_trials(states=WHOLE[:1]), key=lambda trial: trial.value)[:5]:
        told = (
            f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in trial.params.items()
        )
        print(f"{trial.value:.4f}  {', '.join(told)}")
    best = optuna.trial.FixedTrial(study.best_params)
    made = settled(given, best)
    made.lr, made.weight_decay = (
        study.best_params["learning_rate"],
        study.best_params["weight_decay"],
    )
    print(
        f"best: --lr {made.lr:.3g} --weight-decay {made.weight_decay:.3g} --dropout "
        f"{made.dropout:.3g} --hidden {made.hidden} --link {made.link} --pooling "
        f"{' '.join(made.pooling)}"
    )
    return made


def main() -> None:
    parser = train_judge.parser()
    parser.description = __doc__
    parser.add_argument(
        "--trials", type=int, default=20, help="in all, those of earlier runs among them"
    )
    given = parser.parse_args()
    if given.trials < 1:
        parser.error(f"--trials is {given.trials}, expected 1 or more")
    if given.link == "concat":
        parser.error(
            "--link is concat, which has no part for surface features; expected another, or "
            "train_judge.py"
        )
    if given.smoke:
        given.trials = min(given.trials, 3)
    train_judge.train(search(given))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command goes on from the last whole trial")
    except DeadRunError as error:
        sys.exit(f"\nsearch_judge: {error}")
    except (OSError, ValueError) as error:
        sys.exit(f"search_judge: {error}")
