"""The frame of the command ``model-components``.

A command is a function in the ``_cli.py`` of its package, named in pyproject.toml as an entry
point. Its parameters and docstring are the flags and their help. They are read by tyro, which needs
a tenth of a second and knows dataclasses, so that flags and configs cannot differ. Those files load
neither torch nor transformers when they are imported: ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import importlib.metadata
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from . import __version__
from ._folders import is_begun
from ._report import plain

GROUP = "model_components.commands"
"""The group of entry points; a dot in a name separates a group of commands from its command."""
GOES_ON = "the same command goes on from here"
ON_TERMINAL = sys.stderr.isatty()
"""Whether someone watches: the default of ``progress``."""

_OWN = {"doctor": "model_components.doctor:doctor"}  # known even if our metadata is damaged
_SHARED = """Every command also takes --json (print the result as JSON) and --config FILE (YAML
with values of flags; flags on the command line come after it, so they win)."""


def main(
    arguments: Sequence[str] | None = None,
    *,
    program: str = "model-components",
    commands: Mapping[str, str] | None = None,
) -> int:
    """Run a command line.

    Args:
        arguments: The words after the program's name; default: this process's.
        program: The program's name.
        commands: Names and functions, as ``"package.module:function"``; default: those of the
            installed packages.

    Returns:
        The exit status: 0, 1 after an error, 130 after Ctrl-C; a wrong command line exits with 2.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if commands is None:
        found = importlib.metadata.entry_points(group=GROUP)
        commands = {entry.name: entry.value for entry in found} | _OWN
    if words == ["--version"]:
        print(f"{program} {__version__}")
        return 0
    name, words = _command_of(words, program, commands)
    shared, words = _shared_flags(words)
    if not ON_TERMINAL:  # before transformers is imported: it shows bars of its own
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return _run(program, name, commands[name], shared, words)


def _command_of(
    words: list[str], program: str, commands: Mapping[str, str]
) -> tuple[str, list[str]]:
    """Return the command that the first words name, and the words after them."""
    name = ""
    for number, word in enumerate(words, 1):
        if word in ("-h", "--help"):
            break
        name = f"{name}.{word}" if name else word
        if name in commands:
            return name, words[number:]
        if not any(known.startswith(f"{name}.") for known in commands):
            near = difflib.get_close_matches(name, commands, 1)
            hint = f"; perhaps {near[0].replace('.', ' ')}" if near else ""
            print(f"{program}: there is no command {name!r}{hint}; see --help", file=sys.stderr)
            sys.exit(2)
    _print_commands(name, program, commands)
    sys.exit(0 if words[-1:] in (["-h"], ["--help"]) else 2)


def _print_commands(group: str, program: str, commands: Mapping[str, str]) -> None:
    """Print the commands of a group, or all, each with the first line of its docstring."""
    print(f"usage: {program} COMMAND ...\n\ncommands, each with --help:")
    for name in sorted(commands):
        if not group or name.startswith(f"{group}."):
            purpose = inspect.getdoc(pkgutil.resolve_name(commands[name])) or ""
            print(f"  {name.replace('.', ' '):<16}{purpose.splitlines()[0]}")


def _shared_flags(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Take the flags of every command out of the words; a file's values come before the rest."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--config", type=Path)
    shared, rest = parser.parse_known_args(words)
    return shared, rest


def _words_of(path: Path) -> list[str]:
    """Return the command-line words for the values in a YAML file.

    Raises:
        ValueError: It is not a YAML mapping.
    """
    import yaml  # only where a file is named

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config: {path} is not YAML ({error})") from error
    if not isinstance(values, Mapping):
        raise ValueError(
            f"--config: expected names of flags and values in {path}, got {type(values).__name__}"
        )
    words = []
    for name, value in values.items():
        flag = str(name).replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        elif isinstance(value, Mapping):
            words += [f"--{flag}", *(f"{key}={inner}" for key, inner in value.items())]
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words


def _bindable(function: Callable[..., object]) -> Callable[..., functools.partial[object]]:
    """Return a function of the same signature that binds its arguments and runs nothing.

    So errors of the command line and of the work stay apart. Positional parameters are shown by
    their names; the fields of a config are flags themselves, without the parameter's name.
    """
    import tyro  # after the command's name is known to be right

    def bind(*args: object, **kwargs: object) -> functools.partial[object]:
        return functools.partial(function, *args, **kwargs)

    hints: dict[str, Any] = get_type_hints(function)
    signature = inspect.signature(function)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            hints[name] = Annotated[hints[name], tyro.conf.arg(metavar=name.upper())]
        elif is_dataclass(hints[name]):
            hints[name] = Annotated[hints[name], tyro.conf.arg(name="")]
    parameters = [p.replace(annotation=hints[n]) for n, p in signature.parameters.items()]
    # not functools.wraps: tyro would look through it, at the annotations of the function itself
    bind.__dict__["__signature__"] = signature.replace(parameters=parameters)
    bind.__annotations__ = hints
    bind.__doc__ = function.__doc__
    return bind


def _run(
    program: str, name: str, command: str, shared: argparse.Namespace, words: list[str]
) -> int:
    """Parse the words, do the work and print its result; return the exit status."""
    import tyro

    work: functools.partial[object] | None = None
    try:
        if shared.config is not None:
            words = [*_words_of(shared.config), *words]
        function = pkgutil.resolve_name(command)
        purpose = (inspect.getdoc(function) or "").split("Args:")[0].strip()
        description = f"{purpose}\n\n{_SHARED}"
        called = f"{program} {name.replace('.', ' ')}"
        work = tyro.cli(_bindable(function), prog=called, args=words, description=description)
        with contextlib.redirect_stdout(sys.stderr):  # stdout holds the result and nothing else
            result = work()
        if result is not None:
            _print(result, shared.json)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        kept = str(stop) or (_goes_on(work) if work is not None else "")
        print(
            f"{program}: stopped; {kept or 'nothing was kept, the same command begins anew'}",
            file=sys.stderr,
        )
        return 130
    return int(getattr(result, "exit_status", 0))


def _goes_on(work: functools.partial[object]) -> str:
    """Return how to go on after a stop; empty if nothing was kept."""
    given = inspect.signature(work.func).bind(*work.args, **work.keywords).arguments
    out = given.get("out")
    return GOES_ON if isinstance(out, Path) and is_begun(out) else ""


def _print(result: object, as_json: bool) -> None:
    """Print a report, or rows one by one as they come."""
    if isinstance(result, Iterator):
        for row in result:
            print(json.dumps(row, ensure_ascii=False), flush=True)
    elif as_json:
        print(json.dumps(plain(result), ensure_ascii=False))
    else:
        print(result)
