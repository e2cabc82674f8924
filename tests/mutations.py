"""Planted errors: small changes at drawn places of the source, one at a time; which of them do the
tests not notice?

A change is one that a tired person makes: a comparison that is off by one or turned round, another
sign, a condition that is negated, a number off by one, a check that is gone. For each, the doctests
of its file and the tests of its package run, those first that name most of what the file defines. A
test that fails without the change, too, does not count. The list goes to results/mutations.json and
to CONTRIBUTING.md (`make mutations`; two hours). A run that was stopped goes on at the commit where
it began. ``--again`` tries those that were not noticed once more, at the present commit, after a
test was written.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.results import RESULTS, ROOT, commit, put, today

FOUND, PAGE = RESULTS / "mutations.json", ROOT / "CONTRIBUTING.md"
SHARES = {  # how many of sixty
    "heads/lora": 9,
    "heads/pairwise": 10,
    "kronecker": 12,
    "mergekit_lite": 10,
    "mergekit_lite/masks": 8,
    "model_components": 3,
    "thinker": 8,
}
COMPARED = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is not": "is",
    "is": "is not",
    "not in": "in",
    "in": "not in",
}
REPLACED = {
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "//": "*",
    "%": "*",
    "@": "*",
    "**": "*",
    "&": "|",
    "|": "&",
}
# files of tests before all the others; seconds of one run: one that does not end is noticed
FIRST, PATIENCE = (2, 1200)
HARMLESS: dict[str, str] = {  # by the line when it is changed, judged by reading
    "real = context.mask[:, -n:, None].to(context.keys_values[0][1].dtype)": "keys and values "
    "have one dtype",
    '_STRETCH = {"cpu": 1 << 18, "cuda": 2 << 24}': "results do not depend on how much is blended "
    "at once",
    'if not (order == "b_first"):': "both orders are one product; their speed differs",
    "if not mlps and _tried(model, mlps, runs, "
    "rows)[1]:": "what may be tried all at once is tried one by one",
}


class Mutation(NamedTuple):
    """A change of one file."""

    path: str
    line: int
    old: str
    new: str
    begin: int  # bytes
    end: int
    changed: str  # the line where it begins, when it is changed


class Places(ast.NodeVisitor):
    """All changes that a file may have."""

    def __init__(self, folder: Path, path: Path):
        self.path, self.source = path.relative_to(folder).as_posix(), path.read_bytes()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutation] = []
        self.visit(ast.parse(self.source))

    def offset(self, node: ast.expr | ast.stmt, end: bool = False) -> int:
        line, column = (
            (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)
        )
        assert line is not None
        assert column is not None
        return self.starts[line - 1] + column

    def add(self, node: ast.expr | ast.stmt, begin: int, end: int, new: str) -> None:
        old, line = self.source[begin:end].decode(), self.source.count(b"\n", 0, begin)
        after = self.source.find(b"\n", end)
        changed = (
            self.source[self.starts[line] : begin].decode() + new + self.source[end:after].decode()
        )
        self.found.append(Mutation(self.path, node.lineno, old, new, begin, end, changed.strip()))

    def between(
        self, node: ast.expr, left: ast.expr, right: ast.expr, table: dict[str, str]
    ) -> None:
        begin, end = self.offset(left, end=True), self.offset(right)
        old = self.source[begin:end].decode()
        words = "|".join(re.escape(word) for word in sorted(table, key=len, reverse=True))
        new, count = re.subn(rf"(?<![\w])({words})(?![\w])", lambda m: table[m[1]], old, count=1)
        if count:
            self.add(node, begin, end, new)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            self.between(node, left, right, COMPARED)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(
            isinstance(part, ast.JoinedStr) or _is_text(part) for part in (node.left, node.right)
        ):
            self.between(node, node.left, node.right, REPLACED)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.between(node, node.values[0], node.values[1], {"and": "or", "or": "and"})
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, self.offset(node), self.offset(node, end=True), str(not node.value))
        elif isinstance(node.value, int):
            self.add(node, self.offset(node), self.offset(node, end=True), str(node.value + 1))

    def negate(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            begin, end = self.offset(node.test), self.offset(node.test, end=True)
            self.add(node.test, begin, end, f"not ({self.source[begin:end].decode()})")
            self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = negate

    def visit_Raise(self, node: ast.Raise) -> None:  # its message is not looked into
        self.add(node, self.offset(node), self.offset(node, end=True), "pass")

    def visit_Assert(self, node: ast.Assert) -> None:  # says what cannot be otherwise
        pass

    visit_JoinedStr = visit_Import = visit_ImportFrom = visit_Assert

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in ("strict", "stacklevel"):  # of zip: says what cannot be otherwise
            self.visit(node.value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        pass

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.args.defaults, *node.args.kw_defaults, *node.body):
            if part is not None:
                self.visit(part)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def places(folder: Path, group: str) -> list[Mutation]:
    """All of a package, but none of a kernel: those are compiled, and no line of theirs is seen to
    run."""
    source = folder / "src"
    inner = [source / other for other in SHARES if other.startswith(f"{group}/")]
    files = [
        path
        for path in sorted((source / group).rglob("*.py"))
        if path.name not in ("_triton.py", "_numba.py")
    ]
    return [
        place
        for path in files
        if not any(map(path.is_relative_to, inner))
        for place in Places(folder, path).found
    ]


def drawn(folder: Path, count: int, seed: int) -> list[Mutation]:
    """Some of every package."""
    rng, whole = random.Random(seed), sum(SHARES.values())
    return [
        place
        for group, share in SHARES.items()
        for place in rng.sample(places(folder, group), max(1, round(share * count / whole)))
    ]


def missed(folder: Path, records: list[dict[str, Any]]) -> list[Mutation]:
    """Those that were not noticed, where they are now: the same change that makes the same line."""
    found = []
    for record in records:
        if record["noticed"] or record["changed"] in HARMLESS:
            continue
        same = [
            place
            for place in Places(folder, folder / record["path"]).found
            if (place.old, place.new, place.changed)
            == (record["old"], record["new"], record["changed"])
        ]
        found.append(min(same, key=lambda place: abs(place.line - record["line"])))
    return found


def run(folder: Path, tests: list[str]) -> str:
    """Which test of these fails first in a copy of the repository; nothing where all pass."""
    names = folder / "tests.txt"
    names.write_text("\n".join(tests), encoding="utf-8")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-rfE",
        "-p",
        "no:cacheprovider",
        f"@{names}",
    ]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "no end"
    if done.returncode in (0, 5):  # 5: all of them skip
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if failed is None:
        raise SystemExit(f"mutations: pytest said\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[1]


def tests_of(folder: Path, change: Mutation) -> list[list[str]]:
    """Files of tests, the ones that name most of what the changed file defines first; then all of
    the package."""
    tree = ast.parse((folder / change.path).read_bytes())
    names = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    package, room = Path(change.path).parts[1:3]
    places = [folder / "tests" / package / room, folder / "tests" / package]
    named = {}
    for path in sorted(next(place for place in places if place.is_dir()).rglob("test_*.py")):
        words = set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
        named[path.relative_to(folder).as_posix()] = len(names & words)
    ranked = sorted(named, key=lambda path: -named[path])
    return [[change.path, *ranked[:FIRST]], ranked[FIRST:]]


def noticed(folder: Path, change: Mutation) -> str:
    """Which test fails, that passes where nothing is changed."""
    path = folder / change.path
    whole, beside = path.read_bytes(), []
    for tests in tests_of(folder, change):
        while tests:
            path.write_bytes(whole[: change.begin] + change.new.encode() + whole[change.end :])
            try:
                failed = run(folder, [*tests, *beside])
            finally:
                path.write_bytes(whole)
            if not failed:
                break
            if failed == "no end" or not run(folder, [failed]):
                return failed
            beside.append(f"--deselect={failed}")  # fails anyhow: on this machine, or beside others
    return ""


def write_table(found: dict[str, Any]) -> None:
    """What was planted, and what was not noticed."""
    rows = found["planted"]
    unseen = [row for row in rows if not row["noticed"]]
    later = sum("again" in row for row in rows if row["noticed"])
    since = (
        f", and {later} more after tests were written for them ({found['again']})" if later else ""
    )
    lines = [
        f"Of {len(rows)} errors at random places, the tests noticed "
        f"{len(rows) - len(unseen) - later} ({found['date']} at {found['commit']}){since}; "
        f"{len(unseen)} were not noticed.",
        "",
    ]
    if unseen:
        lines += ["| not noticed | change | why it is harmless |", "|---|---|---|"]
    for row in unseen:
        old, new = (" ".join(row[key].split()).replace("|", "\\|") for key in ("old", "new"))
        told = HARMLESS.get(row["changed"], "")
        lines.append(f"| `{row['path']}` | `{old}` to `{new}` | {told} |")
    put(PAGE, lines, "mutations")


def main(arguments: list[str] | None = None) -> None:
    """Plant errors, and write down what became of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="only those that were not noticed")
    options = parser.parse_args(arguments)
    before = json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else {}
    asked, now = {"seed": options.seed, "count": options.count}, commit().rstrip("+")
    stopped = (
        before and len(before["planted"]) < before["drawn"] and before.items() >= asked.items()
    )
    found = (
        before
        if options.again or stopped
        else asked | {"date": today(), "commit": now, "planted": []}
    )
    records = found.pop("planted")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "main"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
        if options.again:
            found["again"] = f"{today()} at {now}"
            changes = missed(folder, records)
        else:
            subprocess.run(["git", "checkout", "-q", found["commit"]], cwd=folder, check=True)
            every = drawn(folder, options.count, options.seed)
            found["drawn"], changes = len(every), every[len(records) :]
        if options.again:
            records = [r for r in records if r["noticed"] or r["changed"] in HARMLESS]
        for number, change in enumerate(changes, 1):
            by = noticed(folder, change)
            record = {
                key: getattr(change, key) for key in ("path", "line", "old", "new", "changed")
            } | {"noticed": by}
            record |= {"again": True} if options.again else {}
            print(
                f"{number}/{len(changes)} {'noticed' if by else 'NOT NOTICED'} {record}", flush=True
            )
            records.append(record)
            if not options.again:
                FOUND.write_text(
                    json.dumps(found | {"planted": records}, indent=1) + "\n", encoding="utf-8"
                )
    FOUND.write_text(json.dumps(found | {"planted": records}, indent=1) + "\n", encoding="utf-8")
    write_table(found | {"planted": records})


if __name__ == "__main__":
    main()
