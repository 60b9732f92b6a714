"""Folders that take their name when they are complete; modes of files and folders."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mac_rag.atomic_files import make_folder, make_writable_folder, write_file, write_folder
from mac_rag.errors import ConfigError


def test_a_folder_takes_the_place_of_the_older_one_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "best"
    for text in ("first", "second"):
        with write_folder(path) as new:
            (new / "inner").mkdir()
            (new / "inner" / "file").write_text(text)
            assert not path.exists() or (path / "inner" / "file").read_text() == "first"
        assert (path / "inner" / "file").read_text() == text
        assert [left.name for left in path.parent.iterdir()] == ["best"]


def test_an_error_leaves_the_older_folder_and_the_next_attempt_starts_afresh(tmp_path: Path) -> None:
    path = tmp_path / "best"
    with write_folder(path) as new:
        (new / "file").write_text("first")

    def interrupted() -> None:
        with write_folder(path) as half:
            (half / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (path / "file").read_text() == "first"
    with write_folder(path) as new:
        assert list(new.iterdir()) == []
        (new / "file").write_text("second")
    assert [file.name for file in path.iterdir()] == ["file"]


@pytest.mark.parametrize("size", [5_000, 100_000])
def test_a_file_that_the_system_does_not_take_whole_leaves_the_older_one(tmp_path: Path, size: int) -> None:
    """It refuses the end of a small one, and a piece of a large one."""
    resource = pytest.importorskip("resource", reason="limits are POSIX's")
    write_file(tmp_path / "file", [b"first"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_file(tmp_path / "file", [bytes(size)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"file": b"first"}


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
@pytest.mark.parametrize(("umask", "allowed"), [(0o022, 0o700), (0o000, 0o700), (0o277, 0o500)])
def test_only_their_user_can_read_new_files_and_folders(tmp_path: Path, umask: int, allowed: int) -> None:
    before = os.umask(umask)
    try:
        write_file(tmp_path / "file", [b"text"])
        make_folder(tmp_path / "folder")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"file": 0o600 & allowed, "folder": 0o700 & allowed}


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")
def test_missing_parents_are_as_private_and_existing_folders_keep_their_mode(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    make_folder(tmp_path / "shared" / "a" / "b")
    make_folder(tmp_path / "shared")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("shared", "shared/a", "shared/a/b")]
    assert modes == [0o755, 0o700, 0o700]


def test_a_folder_that_cannot_be_written_is_an_error_with_the_folder(tmp_path: Path) -> None:
    make_writable_folder(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"{tmp_path / 'file'}.* cannot be written: .*; give another folder"):
        make_writable_folder(tmp_path / "file" / "folder")
    with pytest.raises(ConfigError, match=rf"{tmp_path / 'file'} cannot be written: .*; give another folder"):
        make_writable_folder(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_an_error_with_the_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be written: Permission denied"):
        make_writable_folder(tmp_path)
