"""A field trial on a real model: tuned, merged, made smaller, judged.

Beside it a small model thinks.

Command   make real, then: python examples/field_trial/run.py
Data      *.json in --data: lists of {"instruction", "input", "output"}, and for the judge
          alpaca_eval_pairs.jsonl.gz; not part of this repository. Without them, or without the
          model, it says so and ends.
Time      three hours of CPU time, in all; what is done is kept in OUT, and the same command goes on
Result    a table for each chapter, beside what one would have used otherwise; our run is in
          docs/field_trial.md
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
                f"field_trial: {chapter} ended with {done.returncode}; the same command goes on "
                "from there"
            )


if __name__ == "__main__":
    main()
