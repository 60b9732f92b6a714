"""Blocks of memory tokens on disk: found again, refused when damaged, and removed without a trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mac_rag.distributed.staging import Block, Staging, attempt_name, write_block
from mac_rag.errors import BankError, DamageError

KEY = "a" * 64
BLOCK = Block(torch.randn(3, 4, 8), [1, 2])


def test_a_block_is_found_again_and_read_as_it_was(tmp_path: Path) -> None:
    with Staging(tmp_path / "bank") as staging:
        name = write_block(staging.folder, KEY, BLOCK)
        assert write_block(staging.folder, KEY, BLOCK) == name  # by another worker
    with Staging(tmp_path / "bank") as staging:
        assert staging.finished() == {KEY: name}
        phi, rows = staging.read(name, 2, (4, 8))
        assert torch.equal(phi, BLOCK.phi)
        assert rows == [1, 2]


def test_files_are_for_their_user_only(tmp_path: Path) -> None:
    with Staging(tmp_path / "bank") as staging:
        name = write_block(staging.folder, KEY, BLOCK)
        assert staging.folder.stat().st_mode & 0o777 == 0o700
        assert (staging.folder / name).stat().st_mode & 0o777 == 0o600


def test_what_is_damaged_or_of_others_is_refused(tmp_path: Path) -> None:
    with Staging(tmp_path / "bank") as staging:
        name = write_block(staging.folder, KEY, BLOCK)
        for documents, shape in ((3, (4, 8)), (2, (4, 7)), (1, (4, 8))):
            with pytest.raises(DamageError, match="does not fit its documents"):
                staging.read(name, documents, shape)
        path = staging.folder / name
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(DamageError, match=r"is damaged: its checksum differs; remove it, and run"):
            staging.read(name, 2, (4, 8))
        path.unlink()
        with pytest.raises(DamageError, match="all machines of the cluster see the same files"):
            staging.read(name, 2, (4, 8))
        path.symlink_to(tmp_path)
        with pytest.raises(DamageError, match="it is a symbolic link"):
            staging.read(name, 2, (4, 8))


def test_only_own_files_are_removed(tmp_path: Path) -> None:
    with Staging(tmp_path / "bank") as staging:
        kept = write_block(staging.folder, KEY, BLOCK)
        write_block(staging.folder, "b" * 64, BLOCK)
        for name in (f"block-{KEY}-{'0' * 16}.new", f"block-{KEY}-{'0' * 16}", attempt_name(KEY, 3), "mine"):
            (staging.folder / name).touch()
        staging.discard(keep={kept})
        assert {path.name for path in staging.folder.iterdir()} == {kept, "mine"}
        staging.remove()
        assert [path.name for path in staging.folder.iterdir()] == ["mine"]
        (staging.folder / "mine").unlink()
    with Staging(tmp_path / "bank"):
        pass
    assert list(tmp_path.iterdir()) == []  # without blocks, nothing stays


def test_a_second_driver_is_refused(tmp_path: Path) -> None:
    with (
        Staging(tmp_path / "bank"),
        pytest.raises(BankError, match="is open for writing in process"),
    ):
        Staging(tmp_path / "bank")
