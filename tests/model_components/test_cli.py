"""The frame of the command: what words become, and what an error, a stop and a result become."""

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from model_components import __version__, _cli, _flag_files
from model_components._folders import NewFolder
from model_components._report import Report


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large.

    Args:
        width: Numbers in a row.
        marks: Where lines are drawn.
    """

    width: int = 3
    marks: tuple[int, ...] = ()

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"Size: width must be 1 or more, got {self.width}")


@dataclass(frozen=True)
class Made(Report):
    """What `make` did."""

    names: tuple[str, ...]
    width: int
    marks: tuple[int, ...]
    fast: bool

    def summary(self):
        return [f"{len(self.names)} names"]


def make(names: tuple[str, ...], /, *, size: Size, fast: bool = False) -> Made:
    """Make something.

    Args:
        names: Of what is made.
        size: Its size.
        fast: Hurry.
    """
    print("at work")
    return Made(names, size.width, size.marks, fast)


def fail(out: Path, /, *, stop: bool = False, message: str = "") -> None:
    """Fail.

    Args:
        out: A folder.
        stop: As Ctrl-C does.
        message: Of the error.
    """
    if not stop:
        raise ValueError(message)
    with NewFolder(out, "fail", resumable=True) as new:
        (new.folder / "part").write_text("x")
        raise KeyboardInterrupt(message) if message else KeyboardInterrupt


def count(most: int, /):
    """Count.

    Args:
        most: The last number.
    """
    return ({"number": number} for number in range(1, most + 1))


COMMANDS = {
    "make": f"{__name__}:make",
    "try.fail": f"{__name__}:fail",
    "try.count": f"{__name__}:count",
}


def run(*words):
    return _cli.main([*map(str, words)], program="tool", commands=COMMANDS)


def test_a_report_is_printed_as_text_or_as_json_and_nothing_else_is(capsys):
    assert run("make", "a", "b", "--width", 5, "--fast") == 0
    assert capsys.readouterr() == ("2 names\n", "at work\n")
    assert run("make", "--json", "a", "b") == 0
    expected = {"names": ["a", "b"], "width": 3, "marks": [], "fast": False}
    assert json.loads(capsys.readouterr().out) == expected


def test_rows_are_json_lines(capsys):
    assert run("try", "count", 2) == 0
    assert capsys.readouterr().out == '{"number": 1}\n{"number": 2}\n'


@pytest.fixture
def flags(tmp_path):
    """Write a file of flags, and return the words that name it."""

    def write(text):
        (tmp_path / "flags.yml").write_text(text)
        return ["--config", tmp_path / "flags.yml"]

    return write


def made(capsys, *words):
    assert run("make", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_flags_come_from_a_file_and_the_command_line_wins(flags, capsys):
    file = flags("width: 7\nfast: true\nmarks: [1, 2]\n")
    # names come before the file's flags, so that no list of the file takes them
    assert made(capsys, *file, "a", "b") == {
        "names": ["a", "b"],
        "width": 7,
        "marks": [1, 2],
        "fast": True,
    }
    assert not made(capsys, "a", *file, "--no-fast")["fast"]
    assert not made(capsys, "a", "--fast", *flags("fast: false"), "--no-fast")["fast"]
    file = flags("width: 7\nfast: true\nmarks: [1, 2]\n")
    assert made(capsys, "a", *file, "--width=5", "--marks", "3") == {
        "names": ["a"],
        "width": 5,
        "marks": [3],
        "fast": True,
    }


def test_a_value_in_a_file_may_begin_with_a_dash(flags, capsys):
    assert run("make", "a", *flags("width: -7")) == 1
    assert capsys.readouterr().err == "tool: Size: width must be 1 or more, got -7\n"
    assert run("try", "fail", "out", *flags("message: --width")) == 1
    assert capsys.readouterr().err == "tool: --width\n"


BOMB = "width: &a0 [x, x]\n" + "".join(
    f"w{k}: &a{k} [*a{k - 1}, *a{k - 1}]\n" for k in range(1, 40)
)


def test_a_wrong_file_of_flags_is_refused(flags, tmp_path, capsys):
    assert run("make", "a", *flags("[width]")) == 2
    assert "expected a YAML mapping of flags to values in" in capsys.readouterr().err
    assert run("make", "a", *flags("{")) == 2
    assert "expected a YAML mapping" in capsys.readouterr().err
    assert run("make", "a", "--config", tmp_path / "none.yml") == 2
    assert "cannot be read" in capsys.readouterr().err
    for text, said in (
        ("widht: null", "unknown field widht; did you mean width?"),
        ("no_fast: true", "unknown field no_fast"),
        ("help: true", "unknown field help"),
        ("names: a", "unknown field names"),
        ("width: 7\nwidth: 8", "'width' is repeated"),
        ("? [a]\n: b", "expected a single value as a key, got several (line 1)"),
        ("width: !!timestamp foo", "expected a YAML mapping"),
        (BOMB, "expected at most 100,000 values with aliases expanded"),
        ("width: &a [*a]", "expected at most 100,000 values"),
        ("width: " + "[" * 5000, "expected a YAML mapping"),
    ):
        assert run("make", "a", *flags(text)) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit) as wrong:
        run("make", "a", *flags("width: 7"), *flags("width: 7"))
    assert wrong.value.code == 2


def test_words_of_a_file_mean_what_they_mean_on_the_command_line(flags, capsys):
    assert made(capsys, "a", *flags("width: 010"))["width"] == 10  # YAML's own is 8
    assert made(capsys, "a", *flags("width: null\nfast: false"))["width"] == 3
    assert made(capsys, "a", *flags(""))["width"] == 3
    values = {"options": {"x": None, "on": True, "size": "1:30", "day": "2024-13-45"}}
    words = ["--options", "x=null", "on=true", "size=1:30", "day=2024-13-45"]
    assert _flag_files.words_of(values, []) == words
    path = flags("options: {x: null, on: true, size: 1:30, day: 2024-13-45}")[1]
    assert _flag_files.read_flags(path) == values


def test_rows_are_written_in_the_encoding_of_the_output():
    assert _cli.json_line({"id": "日"}, "utf-8") == '{"id": "日"}'
    assert _cli.json_line({"id": "日"}, "cp1252") == '{"id": "\\u65e5"}'
    assert _cli.json_line({"id": "\ud800"}, "utf-8") == '{"id": "\\ud800"}'


def test_a_reader_that_closes_the_pipe_gets_no_traceback():
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    for words in (["--help"], ["doctor", "--json"], ["prune", "--help"], ["--version"]):
        command = [sys.executable, "-m", "model_components", *words]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        process.stdout.close()
        error = process.stderr.read()
        process.stderr.close()
        process.wait()
        assert b"Traceback" not in error
        assert b"Exception ignored" not in error


def test_a_file_that_the_docs_show_is_read(flags, capsys):
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    shown = page.split("```yaml\n")[1].split("```")[0]
    assert _cli.main(["prune", "no-model", "out", *map(str, flags(shown))]) == 1
    assert capsys.readouterr().err.startswith(
        "model-components: text_of: expected a file of text or of records, got texts.json"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mak"], "unknown command 'mak' (did you mean make?)"),
        (["try", "nothing"], "unknown command 'try nothing'"),
        (["make", "a", "--width", "wide"], "wide"),
        (["try", "fail"], "out"),
    ],
)
def test_a_wrong_command_line_exits_with_2(words, said, capsys):
    with pytest.raises(SystemExit) as wrong:
        run(*words)
    assert wrong.value.code == 2
    assert said.lower() in capsys.readouterr().err.lower()


def test_an_error_is_a_line(tmp_path, capsys):
    assert run("make", "a", "--width", 0) == 1
    assert capsys.readouterr().err == "tool: Size: width must be 1 or more, got 0\n"
    assert run("try", "fail", tmp_path / "out", "--message", "fail: no") == 1
    assert capsys.readouterr().err == "tool: fail: no\n"


def test_a_stop_tells_how_to_go_on(tmp_path, capsys, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    assert run("try", "fail", tmp_path / "out", "--stop") == 130
    assert capsys.readouterr().err == "tool: stopped; run the same command again to continue\n"
    assert run("try", "fail", tmp_path / "other", "--stop", "--message", "use --resume") == 130
    assert capsys.readouterr().err == "tool: stopped; use --resume\n"
    monkeypatch.setattr("model_components._cli.pkgutil.resolve_name", lambda _: stop())
    assert run("make", "a") == 130
    assert "the command had not started yet" in capsys.readouterr().err


def test_help_lists_commands_and_groups(capsys):
    for words, names in (
        (["--help"], {"make", "try fail", "try count"}),
        (["try", "-h"], {"try fail", "try count"}),
    ):
        with pytest.raises(SystemExit) as ended:
            run(*words)
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        assert {
            name for name in ("make", "try fail", "try count") if f"  {name} " in printed
        } == names
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2
    with pytest.raises(SystemExit):
        run("make", "--help")
    printed = capsys.readouterr().out
    assert "Numbers in a row." in printed
    assert "--width" in printed


def test_the_version(capsys):
    assert _cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"model-components {__version__}\n"


def test_all_commands_are_installed_and_explained(capsys):
    found = {entry.name for entry in importlib.metadata.entry_points(group=_cli.GROUP)}
    with pytest.raises(SystemExit):
        _cli.main(["--help"])
    printed = capsys.readouterr().out
    assert len(found) >= 16
    assert all(f"  {name.replace('.', ' ')} " in printed for name in (*found, "doctor"))
