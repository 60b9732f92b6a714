"""The keys of a large bank in a file of their own beside it, which opens in a fraction of the time.

Everything in it is derived from the bank: the directory of the entries, and what is read of every row before the first
question. It is memory-mapped. It names the commit that it was made of, and is not used for any other bank, nor when it
is not what was written. It goes when something of it is deleted from the bank.
"""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from dataclasses import fields
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mac_rag.bank.database import KEYS, UNFINISHED
from mac_rag.bank.directory import Directory
from mac_rag.bank.rows import Summaries
from mac_rag.nn.prior import Postings

_DIRECTORY = tuple(field.name for field in fields(Directory))
_SUMMARIES = ("summaries", *Postings._fields)


class KeysFile:
    """The keys of a bank at one commit.

    Args:
        commit: number of the commit, and its writer.
        directory: the entries.
        columns: what is read of every row, as it is in the file, by the names `_SUMMARIES`.
        crc: the checksum of these columns, which is not compared before they are needed: there are many of them.

    Attributes:
        commit: see above.
        directory: see above.
        is_good: False once the columns have turned out not to be what was written, or the file was removed. What was
            read of a removed file stays.
    """

    def __init__(self, commit: tuple[int, str], directory: Directory, columns: dict[str, Tensor], crc: int) -> None:
        self.commit, self.directory = commit, directory
        self.is_good = True
        self._columns, self._crc = columns, crc

    @cached_property
    def summaries(self) -> Summaries | None:
        """What is read of every row at once; None if it is not what was written."""
        if _crc(self._columns, self.commit) != self._crc:
            self.is_good = False
            return None
        summaries, *postings = self._columns.values()
        return Summaries(summaries, Postings(*postings))


def keys_path(bank: Path) -> Path:
    """The file of the keys of a bank."""
    return bank.with_name(bank.name + KEYS)


def write_keys_file(bank: Path, commit: tuple[int, str], directory: Directory, summaries: Summaries) -> None:
    """Writes the keys of a commit.

    Args:
        bank: file of the bank.
        commit: number of the commit, and its writer.
        directory: its entries.
        summaries: what is read of every row.

    Raises:
        OSError: when the file cannot be written.
    """
    listed = {name: getattr(directory, name) for name in _DIRECTORY}
    own = summaries.summaries, *summaries.lexical
    columns = {name: one.contiguous() for name, one in zip(_SUMMARIES, own, strict=True)}
    about = {"commit": commit, "directory": _crc(listed, commit), "summaries": _crc(columns, commit)}
    path = keys_path(bank)
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        save_file({**listed, **columns}, unfinished, {"bank": json.dumps(about)})
        unfinished.chmod(0o600)
        unfinished.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def read_keys_file(bank: Path) -> KeysFile | None:
    """The keys beside a bank; None if there are none, or the entries are not what was written."""
    try:
        with safe_open(keys_path(bank), framework="pt") as file:
            about = json.loads(file.metadata()["bank"])
            listed, columns = ({name: file.get_tensor(name) for name in names} for names in (_DIRECTORY, _SUMMARIES))
        version, writer = about["commit"]
        if _crc(listed, (version, writer)) != about["directory"] or not isinstance(version, int):
            return None
        return KeysFile((version, writer), Directory(**listed), columns, about["summaries"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError):
        return None


def remove_keys_file(bank: Path) -> None:
    """Removes the keys beside a bank, if there are any."""
    for path in (keys_path(bank), keys_path(bank).with_name(keys_path(bank).name + UNFINISHED)):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _crc(columns: dict[str, Tensor], commit: tuple[int, str]) -> int:
    crc = zlib.crc32(json.dumps(commit).encode())
    for name, tensor in columns.items():
        described = f"{name} {tensor.dtype} {list(tensor.shape)}"
        crc = zlib.crc32(described.encode(), crc)
        if tensor.numel():
            crc = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, crc)
    return crc
