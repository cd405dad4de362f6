"""What users asked for is written as a whole or not at all."""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybrid_kv.errors import ConfigError, WriteError
from hybrid_kv.report.files import check_files, check_folder, write_file
from tests import forked

OLD, NEW = "an older report\n", "a newer report\n" * 100


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file grows beyond `num_bytes`: a write takes what fits, the next one fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("old", [OLD, None])
def test_a_disk_that_fills_up_leaves_the_old_file_or_none(tmp_path: Path, old: str | None) -> None:
    """A full disk left 4 KB of a report of 24 KB."""
    file = tmp_path / "run.json"
    if old is not None:
        file.write_text(old)
    with full_disk(37), pytest.raises(WriteError) as caught:
        write_file(file, NEW, "report")
    assert str(caught.value).startswith(f"report '{file}' cannot be written: ")
    assert (file.read_text() if file.exists() else None) == old
    assert list(tmp_path.iterdir()) == ([file] if old else [])


def test_what_the_disk_refuses_late_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    file = tmp_path / "run.json"
    with pytest.raises(WriteError, match="No space left on device; free space"):
        write_file(file, NEW, "report")
    assert not list(tmp_path.iterdir())


def test_the_contents_are_on_the_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("rename"), replace(*names)))
    write_file(tmp_path / "run.json", NEW, "report")
    assert done == ["fsync", "rename", "fsync"]  # the last one of the folder


def test_permissions_are_kept_or_the_users_own(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text(OLD)
    old.chmod(0o640)
    mask = os.umask(0o027)
    try:
        write_file(old, NEW, "report")
        write_file(new, NEW, "report")
    finally:
        os.umask(mask)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (old, new)] == [0o640, 0o640]
    assert old.read_text() == new.read_text() == NEW


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "run.json", tmp_path / "latest.json"
    link.symlink_to(target)
    for text in (OLD, NEW):  # to nothing yet, then to a file
        write_file(link, text, "report")
        assert link.is_symlink()
        assert target.read_text() == text


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_files({"--json": pipe})
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_file(pipe, NEW, "report")
    reader.join(timeout=60)
    assert got == [NEW]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_that_is_full_says_so() -> None:
    with pytest.raises(WriteError, match="No space left on device"):
        write_file("/dev/full", NEW, "report")


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "out.txt"])
def test_stdout_by_any_name_is_appended_to(tmp_path: Path, name: str) -> None:
    """Where the shell sends stdout to a file, that file must not be cut or renamed over."""
    code = (
        "from hybrid_kv.report.files import check_files, write_file\n"
        f"check_files({{'--json': {name!r}}})\n"
        f"print('before'); write_file({name!r}, 'report\\n', 'report'); print('after')"
    )
    with (
        (tmp_path / "out.txt").open("w") as out,
        forked.start("-c", code, stdout=out, cwd=tmp_path) as run,
    ):
        assert run.wait(60) == 0
    assert (tmp_path / "out.txt").read_text() == "before\nreport\nafter\n"


def test_an_open_descriptor_is_written_to_and_not_renamed_over(tmp_path: Path) -> None:
    with (tmp_path / "run.json").open("w+") as file:
        write_file(f"/dev/fd/{file.fileno()}", NEW, "report")
        assert file.read() == NEW


def test_checking_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    check_files({"--json": file, "--trace": None, "--html": tmp_path / "page.html"})
    check_folder("--svg", tmp_path / "figures")
    assert not list(tmp_path.iterdir())
    file.write_text(OLD)
    check_files({"--json": file})
    assert file.read_text() == OLD


def test_a_file_that_may_not_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.json"
    file.write_text(OLD)
    monkeypatch.setattr(os, "access", lambda path, _: str(path) != str(file))  # as for non-root
    with pytest.raises(ConfigError, match=r"--json must name a file that can be written.*denied"):
        check_files({"--json": file})
    with pytest.raises(WriteError, match="Permission denied"):
        write_file(file, NEW, "report")
    assert file.read_text() == OLD


def test_a_folder_in_which_nothing_can_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match="--json must name a file that can be written"):
        check_files({"--json": "/sys/run.json"})
    with pytest.raises(ConfigError, match="--json must name a file in an existing folder"):
        check_files({"--json": "no/such/folder.json"})


def test_two_options_never_write_one_file(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    link = tmp_path / "link.json"
    link.symlink_to(file)
    with pytest.raises(ConfigError, match="--trace must not overwrite what --json writes"):
        check_files({"--json": file, "--trace": link})
    with pytest.raises(ConfigError, match=r"--json must not overwrite .*, which is read"):
        check_files({"--json": link}, inputs=[file])
