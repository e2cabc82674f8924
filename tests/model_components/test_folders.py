"""What stands on a user's disk: nothing that we did not make is removed, nothing half-written gets
a final name."""

import ast
import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import model_components
from model_components._folders import (
    NewFolder,
    OutputError,
    check_new,
    make_folder,
    new_file,
    write_json,
)
from tests.support.kills import KILLS, run_killed

SOURCE = Path(model_components.__file__).parent.parent


def save(out, **options):
    with NewFolder(out, "save", **options) as new:
        (new.folder / "a").write_text("whole")
    return new


def hidden(out):
    return out.with_name(f".{out.name}.partial")


@pytest.mark.parametrize("resumable", [False, True])
def test_a_folder_gets_its_name_when_it_is_whole(tmp_path, resumable):
    out = tmp_path / "new" / "m"
    with NewFolder(out, "save", resumable=resumable) as new:
        (new.folder / "a").write_text("whole")
        assert not out.exists()
    assert [p.name for p in out.iterdir()] == ["a"]
    assert [p.name for p in out.parent.iterdir()] == ["m"]


@pytest.mark.parametrize("resumable", [False, True])
def test_what_somebody_else_put_there_stays(tmp_path, resumable):
    out = tmp_path / "m"
    hidden(out).mkdir()
    (hidden(out) / "thesis").write_text("x")
    with pytest.raises(
        OutputError, match="was not made by model-components and is in the way; move it"
    ):
        save(out, resumable=resumable)
    assert (hidden(out) / "thesis").read_text() == "x"
    assert not out.exists()


def test_no_symbolic_link_is_followed(tmp_path):
    work, out = tmp_path / "work", tmp_path / "m"
    work.mkdir()
    (work / "thesis").write_text("x")
    for target in (work, tmp_path / "nowhere"):
        hidden(out).symlink_to(target)
        with pytest.raises(OutputError, match="was not made by model-components"):
            save(out)
        assert hidden(out).is_symlink()
        hidden(out).unlink()
    out.symlink_to(work)
    with pytest.raises(OutputError, match="a symbolic link is there"):
        save(out)
    out.unlink()
    assert (work / "thesis").read_text() == "x"
    hidden(out).mkdir()
    (hidden(out) / ".made-by-model-components").symlink_to(work / "thesis")  # a planted marker
    with pytest.raises(OutputError, match="was not made by model-components"):
        save(out)


def test_links_inside_are_removed_and_what_they_lead_to_is_not(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis").write_text("x")
    with pytest.raises(KeyError), NewFolder(tmp_path / "m", "save") as new:
        (new.folder / "link").symlink_to(tmp_path / "work")
        raise KeyError
    assert (tmp_path / "work" / "thesis").read_text() == "x"
    assert [p.name for p in tmp_path.iterdir()] == ["work"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_umask_is_respected(tmp_path, umask):
    before = os.umask(umask)
    try:
        save(tmp_path / "m")
        write_json(tmp_path / "f.json", [1])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o777 & ~umask
    assert stat.S_IMODE((tmp_path / "f.json").stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_the_target_is_looked_at_again(tmp_path, kind, resumable):
    out = tmp_path / "m"
    with (
        pytest.raises(
            OutputError, match=r"something was put there meanwhile; the result is in .*result"
        ),
        NewFolder(out, "save", resumable=resumable) as new,
    ):
        (new.folder / "a").write_text("whole")
        if kind == "folder":
            out.mkdir()
            (out / "late").write_text("x")
        elif kind == "file":
            out.write_text("x")
        else:
            out.symlink_to(tmp_path)
    assert {
        "folder": lambda: (out / "late").read_text() == "x",
        "file": out.is_file,
        "link": out.is_symlink,
    }[kind]()
    assert (
        hidden(out) / "result" / "a"
    ).read_text() == "whole"  # an hour's work is not thrown away
    out.rename(tmp_path / "aside")  # the result is the user's now: no later run clears it
    with pytest.raises(OutputError, match="was not made by model-components"):
        save(out)


def test_an_empty_folder_is_welcome_also_when_it_comes_late(tmp_path):
    (tmp_path / "m").mkdir()
    save(tmp_path / "m")
    with NewFolder(tmp_path / "n", "save") as new:
        (new.folder / "a").write_text("whole")
        (tmp_path / "n").mkdir()
    assert (tmp_path / "n" / "a").exists()


def test_what_is_refused_before_work_starts(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("x")
    (tmp_path / "here").mkdir()
    for name, message in (
        ("file", "a file is there"),
        ("full", "the folder is not empty"),
        ("file/out", "file is a file, expected a folder"),
        ("file/deep/out", "file is a file, expected a folder"),
    ):
        with pytest.raises(OutputError, match=message):
            check_new(tmp_path / name, "merge")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(OutputError, match="this is the current folder"):
        check_new(".", "merge")
    with pytest.raises(OutputError, match="the folder cannot be made"):
        make_folder(tmp_path / "file" / "out", "save")
    with pytest.raises(ValueError, match=r"\(File.*long\)"):
        save(tmp_path / ("m" * 250))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_parent_that_may_not_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="may not be written to"):
        check_new(tmp_path / "m", "merge")


def test_another_users_folder_is_not_ours(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt), NewFolder(tmp_path / "m", "save", resumable=True) as new:
        (new.folder / "a").write_text("part")
        raise KeyboardInterrupt
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    # a folder made just now is ours, whomever a network drive says it belongs to
    save(tmp_path / "n")
    with pytest.raises(OutputError, match="was not made by model-components"):
        save(tmp_path / "m")


def test_two_runs_at_once(tmp_path):
    with NewFolder(tmp_path / "m", "save") as new:
        with pytest.raises(OutputError, match="another run is writing to it now"):
            save(tmp_path / "m")
        (new.folder / "a").write_text("first")
    assert (tmp_path / "m" / "a").read_text() == "first"


def test_an_error_leaves_nothing_or_what_a_later_run_goes_on_from(tmp_path):
    for resumable in (False, True):
        with pytest.raises(KeyError), NewFolder(tmp_path / "m", "save", resumable=resumable) as new:
            (new.folder / "a").write_text("part")
            (new.place / "state").write_text("1")
            raise KeyError
        assert hidden(tmp_path / "m").exists() == resumable
    with NewFolder(tmp_path / "m", "save", resumable=True) as new:
        assert (new.folder / "a").read_text() == "part"
        assert (new.place / "state").read_text() == "1"
        new.clear(keep=["b"])
        assert not (new.folder / "a").exists()
    assert list((tmp_path / "m").iterdir()) == []


def test_a_save_clears_what_a_killed_save_left(tmp_path):
    with pytest.raises(KeyError), NewFolder(tmp_path / "m", "save", resumable=True) as new:
        (new.folder / "stale").write_text("part")
        raise KeyError
    save(tmp_path / "m")
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["a"]


SCRIPT = f"""
import sys
from model_components._folders import NewFolder
{KILLS}
with NewFolder(sys.argv[1], "save") as new:
    for i in range(20):
        (new.folder / str(i)).write_text("x" * 100)
"""


def test_killed_at_any_time_there_is_all_or_nothing(tmp_path):
    out = tmp_path / "m"
    changes = run_killed([SCRIPT, out], tmp_path, at=0)
    assert changes > 20
    shutil.rmtree(out)
    for at in range(1, changes + 1):
        run_killed([SCRIPT, out], tmp_path, at)
        if out.exists():
            assert len(list(out.iterdir())) == 20
            shutil.rmtree(out)
    save(out)
    assert [p.name for p in out.iterdir()] == ["a"]
    assert not hidden(out).exists()


def test_a_hidden_folder_that_was_exchanged_is_left_alone(tmp_path):
    out = tmp_path / "m"
    with (
        pytest.raises(OutputError, match="was not made by"),
        NewFolder(out, "save", resumable=True),
    ):
        hidden(out).rename(tmp_path / "moved")
        hidden(out).mkdir()
        (hidden(out) / "thesis").write_text("x")
    assert (hidden(out) / "thesis").read_text() == "x"
    assert not out.exists()


def test_files_are_whole_or_as_they_were(tmp_path):
    path = tmp_path / "sub" / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(OSError, match="No space"), new_file(path, "save") as part:
        part.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert path.read_text() == '{\n  "a": 1\n}\n'
    with pytest.raises(
        OutputError, match="a folder, link or device is there, expected the name of a file"
    ):
        write_json(path.parent, [])
    (tmp_path / "victim").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OutputError, match="a folder, link or device is there"):
            write_json(tmp_path / name, [])
    assert (tmp_path / "victim").read_text() == "x"
    assert (tmp_path / "link").is_symlink()
    path.chmod(0o600)
    write_json(path, [1])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(OutputError, match="File name too long"):
        write_json(tmp_path / ("m" * 250), [])
    assert sorted(p.name for p in path.parent.iterdir()) == ["a.json"]


FORBIDDEN = {
    "mkdir",
    "makedirs",
    "rmdir",
    "rmtree",
    "unlink",
    "rename",
    "mkdtemp",
    "TemporaryDirectory",
    "move",
}
PACKAGES = ("model_components", "heads", "kronecker", "mergekit_lite", "thinker")


def test_no_other_code_creates_replaces_or_removes():
    files = [path for package in PACKAGES for path in sorted((SOURCE / package).rglob("*.py"))]
    assert len(files) > 80
    for path in files:
        if path.name == "_folders.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                bad = node.func.attr in FORBIDDEN or (
                    owner == "os" and node.func.attr in ("replace", "remove")
                )
                assert not bad, f"{path}:{node.lineno}: {node.func.attr} belongs into _folders.py"


def interrupted(out):
    with pytest.raises(KeyError), NewFolder(out, "save", resumable=True) as new:
        (new.folder / "a").write_text("part")
        raise KeyError
    return new


def test_a_result_that_was_made_a_link_is_not_emptied(tmp_path):
    work, new = tmp_path / "work", interrupted(tmp_path / "m")
    work.mkdir()
    (work / "thesis").write_text("x")
    (new.folder / "a").unlink()
    new.folder.rmdir()
    new.folder.symlink_to(work)
    with pytest.raises(OutputError, match="got a link or a file"):
        NewFolder(tmp_path / "m", "save", resumable=True).open()
    save(tmp_path / "m")  # one that keeps nothing removes the link, and not what it leads to
    assert (work / "thesis").read_text() == "x"
    new = interrupted(tmp_path / "n")
    new.folder.rename(tmp_path / "moved")
    new.folder.write_text("a file")
    for _ in range(2):  # the lock is let go of
        with pytest.raises(OutputError, match="got a link or a file"):
            NewFolder(tmp_path / "n", "save", resumable=True).open()


def test_a_result_that_becomes_a_link_meanwhile(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis").write_text("x")
    with (
        pytest.raises(OutputError, match="got a link or a file"),
        NewFolder(tmp_path / "m", "s", resumable=True) as new,
    ):
        new.folder.rmdir()
        new.folder.symlink_to(tmp_path / "work")
        new.clear()
    assert (tmp_path / "work" / "thesis").read_text() == "x"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            r"\(No.*device\)",
        ),
        (KeyboardInterrupt("stopped"), "stopped"),
    ],
)
def test_an_error_on_the_way_lets_go_of_the_lock(tmp_path, monkeypatch, error, told):
    real = os.mkdir

    def full(path, *rest):
        if str(path).endswith("result"):
            raise error
        return real(path, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", full)
        with pytest.raises((OutputError, KeyboardInterrupt), match=told):
            save(tmp_path / "m")
    save(tmp_path / "m")


def test_any_rename_that_fails_keeps_the_result(tmp_path, monkeypatch):
    def refused(*paths):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refused)
        with pytest.raises(OutputError, match=r"Permission denied; the result is in .*result"):
            save(tmp_path / "m")
    assert (hidden(tmp_path / "m") / "result" / "a").read_text() == "whole"
    with pytest.raises(OutputError, match="was not made by model-components"):
        save(tmp_path / "m")


def test_cleaning_up_hides_no_error_and_fails_no_save(tmp_path, monkeypatch):
    def refused(*paths, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("model_components._folders.shutil.rmtree", refused)
        with pytest.raises(KeyError), NewFolder(tmp_path / "m", "save") as new:
            raise KeyError
        with NewFolder(tmp_path / "n", "save", resumable=True) as new:
            (new.place / "fitted").mkdir()
    assert (tmp_path / "n").is_dir()
    save(tmp_path / "m")


def test_a_name_that_goes_to_another_run_in_between(tmp_path, monkeypatch):
    real, turns = os.open, []

    def slow(path, flags, *rest, **named):
        descriptor = real(path, flags, *rest, **named)
        if str(path).endswith(".partial") and not turns:
            turns.append(path)
            # as a run that finished and removed it
            hidden(tmp_path / "m").rename(tmp_path / "gone")
        return descriptor

    monkeypatch.setattr(os, "open", slow)
    save(tmp_path / "m")
    assert (tmp_path / "m" / "a").exists()


def test_an_error_before_anything_was_written_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), NewFolder(tmp_path / "m", "save", resumable=True):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_used_twice(tmp_path):
    with NewFolder(tmp_path / "m", "save") as new:
        with pytest.raises(OutputError, match="the folder is open already"):
            new.open()
        new.publish()
    assert (tmp_path / "m").is_dir()
    with NewFolder(tmp_path / "n", "save") as new:
        new.discard()
    assert not (tmp_path / "n").exists()


def test_more_that_is_refused_before_work_starts(tmp_path, monkeypatch):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "mount").mkdir()
    for name, message in (
        ("dangling/m", "is a file, expected a folder"),
        ("m" * 300, "File name too long"),
    ):
        with pytest.raises(OutputError, match=message):
            check_new(tmp_path / name, "merge")
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "mount")
    with pytest.raises(OutputError, match="or a mount point; choose a folder inside it"):
        check_new(tmp_path / "mount", "merge")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_a_drive_without_locks_is_written_to_and_a_broken_one_is_not(tmp_path, monkeypatch, number):
    def refused(*given):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refused)
    if number == errno.ENOLCK:
        save(tmp_path / "m")
        assert (tmp_path / "m" / "a").exists()
    else:
        with pytest.raises(OutputError, match="Input/output error"):
            save(tmp_path / "m")


def test_a_kill_after_the_name_leaves_no_result_and_the_next_run_clears_it(tmp_path):
    out = tmp_path / "m"
    killed = """
import os, sys
from model_components._folders import NewFolder
NewFolder.discard = lambda self: os._exit(9)
with NewFolder(sys.argv[1], "save") as new:
    (new.folder / "a").write_text("whole")
"""
    assert subprocess.run([sys.executable, "-c", killed, out], check=False).returncode == 9
    assert (out / "a").read_text() == "whole"
    assert os.listdir(hidden(out)) == [".made-by-model-components"]
    shutil.rmtree(out)
    save(out)
    assert not hidden(out).exists()


def test_the_marker_is_there_before_anything_else_and_goes_last(tmp_path, monkeypatch):
    """Killed at any moment between, what is left is ours: empty, or marked."""
    new, seen = NewFolder(tmp_path / "m", "save"), []
    marker, unlink, mkdir = new.place / ".made-by-model-components", os.unlink, os.mkdir

    def unlinking(path, *rest, **named):
        if Path(path) == marker:
            seen.append(os.listdir(new.place))
        return unlink(path, *rest, **named)

    def making(path, *rest, **named):
        if Path(path) == new.folder:
            seen.append(os.listdir(new.place))
        return mkdir(path, *rest, **named)

    monkeypatch.setattr(os, "unlink", unlinking)
    monkeypatch.setattr(os, "mkdir", making)
    new.open()
    for number in range(30):
        (new.place / str(number)).write_text("1")
    new.discard()
    assert seen == [[marker.name], [marker.name]]
    assert not new.place.exists()


def test_a_marker_that_another_user_planted_is_none(tmp_path, monkeypatch):
    new, real = interrupted(tmp_path / "m"), os.lstat

    def planted(path, *rest, **named):
        found = real(path, *rest, **named)
        if Path(path) == new.place / ".made-by-model-components":
            return os.stat_result(
                [found.st_uid + 1 if i == 4 else value for i, value in enumerate(found)]
            )
        return found

    monkeypatch.setattr(os, "lstat", planted)
    with pytest.raises(OutputError, match="was not made by model-components"):
        save(tmp_path / "m")


def test_parts_of_a_file_have_names_that_nobody_can_plant(tmp_path):
    names = set()
    for _ in range(3):
        with new_file(tmp_path / "a", "save") as part:
            names.add(part.name)
    assert len(names) == 3
