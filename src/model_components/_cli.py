"""Run the command ``model-components``.

Each command is a function in the ``_cli.py`` of its package and an entry point in pyproject.toml.
tyro turns the function's parameters into flags, and the docstring into the help texts of the flags.
tyro also reads dataclasses, so a config and its flags are declared once. Importing a ``_cli.py``
loads neither torch nor transformers, so that ``--help`` is fast.
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
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from . import __version__
from ._flag_files import FlagFileError, flags_of_file
from ._folders import is_begun
from ._report import plain

GROUP = "model_components.commands"
"""The entry-point group; the entry point ``a.b`` is the command ``b`` of the group ``a``."""
ON_TERMINAL = sys.stderr is not None and sys.stderr.isatty()  # stderr is None in pythonw
"""Whether standard error is a terminal: the default of ``progress``."""

_BUILT_IN = {  # available even if the metadata of this library is damaged
    "doctor": "model_components.doctor:doctor",
    "kernels": "model_components.kernels:measure_kernels",
}
_SHARED_HELP = """Every command also takes --json (print the result as JSON) and --config FILE (read
flags from a YAML file; a flag on the command line overrides the file)."""


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """The flags that set the device and the progress bar.

    Args:
        device: Device to compute on, such as cpu or cuda.
        progress: Show a progress bar; default: only on a terminal.
    """

    device: str = "cpu"
    progress: bool = ON_TERMINAL


def main(
    arguments: Sequence[str] | None = None,
    *,
    program: str = "model-components",
    commands: Mapping[str, str] | None = None,
) -> int:
    """Run a command line.

    Args:
        arguments: The words after the program's name; default: the arguments of this process.
        program: The program's name.
        commands: The function of each command, as ``"package.module:function"``; default: the
            commands of the installed packages.

    Returns:
        The exit status: 0, or the ``exit_status`` of the command's result; 1 after an error; 2
        after an error in a ``--config`` file; 130 after Ctrl-C.

    Raises:
        SystemExit: The command line is wrong (status 2), or asks for help (status 0).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if commands is None:
        found = importlib.metadata.entry_points(group=GROUP)
        commands = {entry.name: entry.value for entry in found} | _BUILT_IN
    try:
        with _flushed():
            if words == ["--version"]:
                print(f"{program} {__version__}")
                return 0
            name, words = _command_of(words, program, commands)
            shared, words = _shared_flags(words)
            if not ON_TERMINAL:  # before transformers, which shows its own bars, is imported
                os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
            return _run(program, name, commands[name], shared, words)
    except BrokenPipeError:  # after "| head"; otherwise Python's flush at exit would fail, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


@contextlib.contextmanager
def _flushed() -> Iterator[None]:
    """Flush stdout at the end, even if the program prints help and exits."""
    try:
        yield
    finally:
        # a closed pipe raises here, where `main` can still catch the error
        sys.stdout.flush()


def _command_of(
    words: list[str], program: str, commands: Mapping[str, str]
) -> tuple[str, list[str]]:
    """Split words into a command's name and its arguments; without a name, print help and exit."""
    name, asked = "", False
    for number, word in enumerate(words, 1):
        if word in ("-h", "--help"):
            asked = True
            break
        name = f"{name}.{word}" if name else word
        if name in commands:
            return name, words[number:]
        if not any(known.startswith(f"{name}.") for known in commands):
            matches = difflib.get_close_matches(name, commands, 1)
            hint = f" (did you mean {matches[0].replace('.', ' ')}?)" if matches else ""
            problem = f"unknown command {name.replace('.', ' ')!r}{hint}"
            advice = "--help lists all commands; put flags after the command"
            print(f"{program}: {problem}; {advice}", file=sys.stderr)
            sys.exit(2)
    _print_commands(name, program, commands)
    sys.exit(0 if asked else 2)


def _print_commands(group: str, program: str, commands: Mapping[str, str]) -> None:
    """Print the commands of a group, or all commands, with the first lines of their docstrings."""
    print(f"usage: {program} COMMAND ...\n\nCommands (COMMAND --help explains one):")
    for name in sorted(commands):
        if not group or name.startswith(f"{group}."):
            purpose = inspect.getdoc(pkgutil.resolve_name(commands[name])) or ""
            print(f"  {name.replace('.', ' '):<16}{purpose.splitlines()[0]}")


def _shared_flags(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Separate --json and --config, which every command takes, from the other words."""
    # no usage message: it would list only two of the command's flags
    parser = argparse.ArgumentParser(
        prog="model-components", usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--config", type=Path, action="append", default=[])
    shared, rest = parser.parse_known_args(words)
    if len(shared.config) > 1:
        parser.error(f"expected one --config, got {' and '.join(map(str, shared.config))}")
    return shared, rest


def _bindable(function: Callable[..., object]) -> Callable[..., functools.partial[object]]:
    """Return a function for `tyro.cli` that has the same flags but only binds the arguments.

    The command itself runs later, outside `tyro.cli`, so tyro cannot mistake an error of the
    command for a wrong flag.
    """
    hints = get_type_hints(function)
    groups = {name: hints[name] for name in inspect.signature(function).parameters}
    groups = {name: kind for name, kind in groups.items() if is_dataclass(kind)}

    def bind(*args: object, **values: object) -> functools.partial[object]:
        for name, kind in groups.items():
            fields = inspect.signature(kind).parameters
            values[name] = kind(**{field: values.pop(field) for field in fields})
        return functools.partial(function, *args, **values)

    flags = _flags_of(function)
    # not functools.wraps: tyro would then read the annotations of the function itself
    bind.__dict__["__signature__"] = inspect.Signature(flags)
    bind.__annotations__ = {flag.name: flag.annotation for flag in flags}
    bind.__doc__ = function.__doc__
    return bind


def _flags_of(described: Callable[..., object]) -> list[inspect.Parameter]:
    """Return the parameters of a function or a dataclass, annotated for tyro.

    Positional parameters are shown by their names. A parameter whose type is a dataclass is
    replaced by one flag for each field.
    """
    import docstring_parser  # both imported only after the command's name is known to be valid
    import tyro

    hints: dict[str, Any] = get_type_hints(described)
    documented = docstring_parser.parse(inspect.getdoc(described) or "").params
    helps = {param.arg_name: " ".join((param.description or "").split()) for param in documented}
    flags = []
    for name, parameter in inspect.signature(described).parameters.items():
        if is_dataclass(hints[name]):
            flags += _flags_of(hints[name])
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            shown = name.upper() if parameter.default is parameter.empty else f"[{name.upper()}]"
            options = tyro.conf.arg(metavar=shown, help=helps[name], help_behavior_hint="")
        elif "default:" in helps[name] or parameter.default in (None, ()):
            options = tyro.conf.arg(help=helps[name], help_behavior_hint="")
        else:
            options = tyro.conf.arg(help=helps[name])
        # DisallowNone: otherwise tyro would read the word None as a missing value
        hint = Annotated[hints[name], tyro.conf.DisallowNone, options]
        flags.append(parameter.replace(annotation=hint))
    return flags


def _run(
    program: str, name: str, command: str, shared: argparse.Namespace, words: list[str]
) -> int:
    """Parse the words, run the command and print its result; return the exit status."""
    # still None if Ctrl-C comes while modules are imported or words are parsed
    work: functools.partial[object] | None = None
    try:
        called = f"{program} {name.replace('.', ' ')}"
        work = _parsed(pkgutil.resolve_name(command), called, shared.config, words)
        with contextlib.redirect_stdout(sys.stderr):  # stdout gets only the result
            result = work()
        if result is not None:
            _print(result, shared.json)
    except BrokenPipeError:
        # an OSError, but not a failure of the command: `main` exits without a message
        raise
    except FlagFileError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if not isinstance(error, _library_errors()):
            raise
        print(f"{program}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        hint = str(stop) or (
            _continue_hint(work) if work is not None else "the command had not started yet"
        )
        print(f"{program}: stopped; {hint}", file=sys.stderr)
        return 130
    return int(getattr(result, "exit_status", 0))


def _parsed(
    function: Callable[..., object], called: str, files: Sequence[Path], words: list[str]
) -> functools.partial[object]:
    """Return a command's function bound to the arguments in the words and the flag files."""
    import tyro

    for path in files:
        known = [flag.name for flag in _flags_of(function) if flag.kind is flag.KEYWORD_ONLY]
        # append, because positional words after a list from the file would become its items
        words = [*words, *flags_of_file(path, known, words)]
    purpose = (inspect.getdoc(function) or "").split("Args:")[0].strip()
    description = f"{purpose}\n\n{_SHARED_HELP}"
    return tyro.cli(_bindable(function), prog=called, args=words, description=description)


def _library_errors() -> tuple[type[Exception], ...]:
    """Return the exception classes that libraries raise for damaged files and full disks.

    Only libraries that are already imported can have raised an exception, so others are left out.
    """
    return tuple(
        getattr(sys.modules[module], name)
        for module, name in (
            ("safetensors", "SafetensorError"),
            ("huggingface_hub.errors", "StrictDataclassError"),
        )
        if module in sys.modules
    )


def _continue_hint(work: functools.partial[object]) -> str:
    """Return a hint on how to continue after a stop."""
    given = inspect.signature(work.func).bind(*work.args, **work.keywords).arguments
    out = given.get("out")
    if not isinstance(out, Path) or not (is_begun(out) or _has_checkpoints(out)):
        return "no work was saved, so the same command starts over"
    if given.get("fresh"):
        return "run the same command again, without --fresh, to continue"
    return "run the same command again to continue"


def _has_checkpoints(out: Path) -> bool:
    """Return whether a training run left checkpoints in a folder or next to it."""
    # `learn` trains in the second folder; the last ones belong to the runs of a sweep
    places = [
        out / "checkpoints",
        out.with_name(f"{out.name}.training"),
        *out.glob("*/checkpoints"),
    ]
    return any(any(place.glob("checkpoint-*")) for place in places)


def _print(result: object, as_json: bool) -> None:
    """Print a report, or the rows of an iterator one by one as they come."""
    if isinstance(result, Iterator):
        for row in result:
            # flushed, because another program may wait for each row
            print(json_line(plain(row)), flush=True)
    elif as_json:
        print(json_line(plain(result)))
    else:
        print(result)


def json_line(value: object, encoding: str | None = None) -> str:
    """Return a value as JSON; escape non-ASCII characters if the output cannot encode them.

    Args:
        value: The value.
        encoding: Encoding of the output; default: the encoding of stdout.
    """
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(encoding or getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
