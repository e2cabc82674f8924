"""Merges, bakes, pruning and training, disturbed at random, lose nothing and leave nothing behind.

(`make soak`)

Each job is a command that a user runs, on a model of a few million parameters. It is started and
killed (SIGKILL) until it happens to end by itself: at random moments, or while it writes a
checkpoint. Now and then it is started twice at once, or its files cannot grow, as on a full disk.
What it wrote must be what an undisturbed run writes, to the bit. A kill between the moment when a
result gets its name and the end may leave the hidden folder, without a result: the next run to that
name must clear it. One process merges over and over, whose memory and open files are counted. The
summary goes to results/soak.json and docs/scale.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.results import RESULTS, ROOT, commit, hardware, put, today

FOUND, PAGE = RESULTS / "soak.json", ROOT / "docs" / "scale.md"
RECIPE = (
    "merge_method: ties\nbase_model: base\nmodels: [a, b]\nparameters: {weight: 0.5, density: "
    "0.4}\n"
)
BAKE = """
import sys
import torch
from mergekit_lite.masks import Merger
torch.manual_seed(0)
merger = Merger.from_pretrained(["a", "b"])
with torch.no_grad():
    for mask in merger.masks().values():
        mask.uniform_(0, 1)
merger.bake(sys.argv[1], progress=False)
"""
JOBS = {  # the words after python
    "merge": "-m mergekit_lite merge recipe.yml OUT --max-shard-size 4MB --no-progress",
    "regmean": "-m mergekit_lite merge regmean.yml OUT --no-progress --calibration "
    "task0.jsonl task1.jsonl",
    "bake": "bake.py OUT",
    "prune": "-m model_components prune base OUT --calibration texts.txt --tokens 4000 "
    "--context 64 --no-progress",
    "train": "-m model_components think train copy OUT --iterations 60 --length 6 --samples 64 "
    "--no-progress",
    "learn": "-m model_components learn learn.yml OUT --no-progress",
}
LEARN = """components: [a, b]
data: [task0.jsonl, task1.jsonl]
training: {max_steps: 12, save_steps: 2, save_total_limit: 2, use_cpu: true}
compare: []
held_out: 2
"""
CHECKPOINTS = {"train": "OUT/checkpoints", "learn": "OUT.training"}
REFUSED = (
    "another run is writing to it now",
    "is not empty",
    "is finished, with",
)  # the second of two at once
FULL = "cannot be written"
WHOLE = {"train": "result.json"}  # what is there only at the end, where the folder is there before
STEADY = """
import gc, json, os, sys, torch
from mergekit_lite import merge_models
def now():
    gc.collect()
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))
seen = []
options = {"base_model": "base", "weight": [0.5, 0.5], "density": 0.4, "progress": False}
for k in range(int(sys.argv[1])):
    merge_models(["a", "b"], "ties", out=f"steady/{k}", **options)
    seen.append(now())
print(json.dumps([seen[len(seen) // 4], seen[-1]]))
"""


def prepare(folder: Path) -> None:
    """Three models, texts and a recipe."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.support.models import save_tokenizer

    words = [f"w{k}" for k in range(500)]
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    for seed, name in enumerate(("base", "a", "b")):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder / name)
        save_tokenizer(folder / name, words)
    rng = random.Random(0)
    (folder / "texts.txt").write_text(" ".join(rng.choice(words) for _ in range(5000)))
    (folder / "recipe.yml").write_text(RECIPE)
    (folder / "regmean.yml").write_text("merge_method: regmean\nmodels: [a, b]\n")
    (folder / "learn.yml").write_text(LEARN)
    (folder / "bake.py").write_text(BAKE)
    for k in range(2):
        rows = [
            {"prompt": f"w{n}", "completion": " ".join(rng.choice(words) for _ in range(12))}
            for n in range(24)
        ]
        (folder / f"task{k}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def command(job: str, out: str) -> list[str]:
    """Return the words that start a job."""
    return [sys.executable, *JOBS[job].replace("OUT", out).split()]


def digest(folder: Path) -> str:
    """Return a hash of all weights in a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.safetensors")):
        if "checkpoints" not in path.parts:
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def start(folder: Path, job: str, out: str, limit: int | None = None) -> subprocess.Popen:
    """Start a job; with a limit none of its files grows beyond so many bytes."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    )
    words = command(job, out)
    if limit is not None:
        words = ["bash", "-c", f'ulimit -f {limit // 1024}; exec "$@"', "-", *words]
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def end(process: subprocess.Popen, job: str, allowed: tuple[str, ...] = ()) -> int:
    """Wait for a job; its status, where it did not fail for another reason than those allowed."""
    _, errors = process.communicate()
    text = errors.decode()
    if process.returncode > 0 and not any(reason in text for reason in allowed):
        raise SystemExit(f"soak: {job} failed: {text[-2000:]}")
    return process.returncode


def run(folder: Path, job: str, out: str, kill_after: float | None = None) -> int:
    """One start of a job; its status, negative where it was killed."""
    process = start(folder, job, out)
    try:
        process.wait(kill_after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    return end(process, job)


def run_to_checkpoint(folder: Path, job: str, out: str, later: float) -> int:
    """One start of a job, killed while it writes a checkpoint: so many seconds after its begin."""
    place = folder / CHECKPOINTS[job].replace("OUT", out)
    before = set(place.glob("*"))
    process = start(folder, job, out)
    while process.poll() is None:
        if any(path.name.startswith("checkpoint-") for path in set(place.glob("*")) - before):
            time.sleep(later)
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.001)
    return end(process, job)


def run_twice(folder: Path, job: str, out: str, later: float) -> int:
    """Two starts of a job, one a little later: one may refuse."""
    first = start(folder, job, out)
    time.sleep(later)
    second = start(folder, job, out)
    statuses = [end(process, job, REFUSED) for process in (first, second)]
    if 0 not in statuses:
        raise SystemExit(f"soak: of two runs of {job} none ended whole")
    return 0


def run_on_a_full_disk(folder: Path, job: str, out: str, limit: int) -> int:
    """One start of a job whose files may not grow; negative where it did not end whole."""
    # its status is 1 where a file could not grow, and 0 where none had to
    return -end(start(folder, job, out, limit), job, (FULL,))


def disturbed(folder: Path, job: str, out: str, usual: float, rng: random.Random) -> int:
    """One start of a job, disturbed in a way that is drawn; negative where it is to be repeated."""
    way = rng.random()
    if way < 0.1:
        return run_twice(folder, job, out, rng.uniform(0, 0.5) * usual)
    if way < 0.2:
        return run_on_a_full_disk(folder, job, out, rng.choice([4096, 65_536, 1_048_576]))
    if way < 0.5 and job in CHECKPOINTS:
        return run_to_checkpoint(folder, job, out, rng.uniform(0, 0.05))
    return run(folder, job, out, rng.uniform(0.1, 1.4) * usual)


def soak(folder: Path, minutes: float, seed: int) -> dict[str, Any]:
    """Jobs until the time is over; what was counted."""
    rng, counts = (
        random.Random(seed),
        {job: {"done": 0, "stopped": 0, "cleared": 0} for job in JOBS},
    )
    truth, usual = {}, {}
    for job in JOBS:
        begin = time.monotonic()
        run(folder, job, f"truth-{job}")
        usual[job], truth[job] = time.monotonic() - begin, digest(folder / f"truth-{job}")
    end_of_soak, number = time.monotonic() + 60 * minutes, 0
    while time.monotonic() < end_of_soak:
        job, out, late = rng.choice(list(JOBS)), f"out-{number}", False
        number += 1
        while disturbed(folder, job, out, usual[job], rng) < 0:
            counts[job]["stopped"] += 1
            done = folder / out / WHOLE.get(job, "")
            if done.exists() and digest(folder / out) != truth[job]:
                raise SystemExit(f"soak: {out} ({job}) has its name and is not whole")
            if done.exists():
                late = True
                break
        if digest(folder / out) != truth[job]:
            raise SystemExit(f"soak: {out} ({job}) is other than an undisturbed run's")
        counts[job]["done"] += 1
        if (
            late
            and (hidden := _hidden(folder, out))
            and not any((path / "result").exists() for path in hidden)
        ):
            counts[job]["cleared"] += 1
            shutil.rmtree(folder / out)
            run(folder, job, out)
        if left := _hidden(folder, out):
            raise SystemExit(f"soak: {job} left {[path.name for path in left]}")
        for path in (folder / out, folder / f"{out}.training"):
            shutil.rmtree(path, ignore_errors=True)
        print(f"{job:14s} whole after {counts[job]['stopped']} stops in all", flush=True)
    return counts


def _hidden(folder: Path, out: str) -> list[Path]:
    """What lies beside a result, under its name with a dot before it."""
    return [path for path in folder.iterdir() if path.name.startswith(f".{out}.")]


def steady(folder: Path, merges: int) -> dict[str, Any]:
    """Memory and open files of one process after a quarter of its merges, and after all."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", STEADY, str(merges)],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    (memory, files), (memory_after, files_after) = json.loads(done.stdout.splitlines()[-1])
    return {"merges": merges, "bytes": [memory, memory_after], "files": [files, files_after]}


def write_table(found: dict[str, Any]) -> None:
    """The page's summary."""
    lines = ["| job | completed results | interruptions |", "|---|---|---|"]
    lines += [f"| {job} | {row['done']} | {row['stopped']} |" for job, row in found["jobs"].items()]
    steady, cleared = found["steady"], sum(row["cleared"] for row in found["jobs"].values())
    beside = f" except {cleared} without a result, which the next run removed" if cleared else ""
    memory, files = [f"{size / 1e6:.0f} MB" for size in steady["bytes"]], steady["files"]
    lines += [
        "",
        f"{found['minutes']:.0f} minutes. Each result is identical, bit for bit, to the result of "
        f"an undisturbed run, and no hidden folders were left{beside}. One process that merged "
        f"{steady['merges']} times had {memory[0]} of memory and {files[0]} open files after a "
        f"quarter of the merges, and {memory[1]} and {files[1]} open files at the end. "
        f"{found['hardware']}; {found['date']} at {found['commit']}.",
    ]
    put(PAGE, lines, "soak")


def main(arguments: list[str] | None = None) -> None:
    """Soak, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--merges", type=int, default=200, help="of the process that is watched")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-summary", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        watched = steady(Path(folder), options.merges)
        if (
            watched["bytes"][1] > 1.1 * watched["bytes"][0]
            or watched["files"][1] > watched["files"][0]
        ):
            raise SystemExit(f"soak: one process grows: {watched}")
        jobs = soak(Path(folder), options.minutes, options.seed)
    found = {"minutes": options.minutes, "jobs": jobs, "steady": watched}
    found |= {"date": today(), "commit": commit(), "hardware": hardware()}
    print(json.dumps(found))
    if not options.no_summary:
        FOUND.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        write_table(found)


if __name__ == "__main__":
    main()
