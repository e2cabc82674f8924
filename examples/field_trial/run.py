"""A field trial on a real model: tune it, merge it, make it smaller, and judge it.

The last chapter trains a small thinker.

Command   make real, then: python examples/field_trial/run.py
Data      *.json in --data: lists of {"instruction", "input", "output"}, and for the judge
          alpaca_eval_pairs.jsonl.gz; not part of this repository. If the data or the model are
          missing, the script prints what is missing and ends.
Time      70 minutes of CPU time in all; finished parts are kept in OUT, and the same command
          continues from there
Result    a table for each chapter; docs/field_trial.md has our results and more comparisons
"""

import subprocess
import sys
from pathlib import Path

from story import begin

CHAPTERS = ("tune", "merge", "shrink", "judge", "think")


def main() -> None:
    if begin(__doc__) is None:
        return
    for chapter in CHAPTERS:
        print(f"\n== {chapter}", flush=True)
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(f"{chapter}.py")), *sys.argv[1:]]
        )
        if done.returncode:
            sys.exit(
                f"field_trial: {chapter} failed with exit status {done.returncode}; run the same "
                "command again to continue from there"
            )


if __name__ == "__main__":
    main()
