"""The keys of a large bank in a file of their own beside it, which opens in a fraction of the time.

Everything in it is derived from the bank: the directory of the entries, and what is read of every row before the first
question. It is memory-mapped. It names the commit that it was made of, and is not used for any other bank, nor when it
is not what was written. It goes when something of it is deleted from the bank.
"""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mac_rag.bank.database import KEYS, UNFINISHED
from mac_rag.bank.directory import Directory
from mac_rag.bank.rows import Summaries
from mac_rag.nn.prior import postings_of

_DIRECTORY = tuple(field.name for field in fields(Directory))
_COLUMNS = (*_DIRECTORY, *Summaries._fields[:-1], "posting_ends", "posting_rows", "posting_weights")


@dataclass(frozen=True)
class KeysFile:
    """The keys of a bank at one commit.

    Attributes:
        version: number of the commit.
        writer: name of its writer.
        directory: the entries.
        summaries: what is read of every row at once.
    """

    version: int
    writer: str
    directory: Directory
    summaries: Summaries


def keys_path(bank: Path) -> Path:
    """The file of the keys of a bank."""
    return bank.with_name(bank.name + KEYS)


def write_keys_file(
    bank: Path, commit: tuple[int, str], directory: Directory, summaries: Summaries, lexical_width: int
) -> None:
    """Writes the keys of a commit.

    Args:
        bank: file of the bank.
        commit: number of the commit, and its writer.
        directory: its entries.
        summaries: what is read of every row.
        lexical_width: numbers of the lexical vectors of a row.

    Raises:
        OSError: when the file cannot be written.
    """
    tensors = (
        *(getattr(directory, name) for name in _DIRECTORY),
        *summaries[:-1],
        *postings_of(*summaries[1:-1], lexical_width),
    )
    columns = {name: tensor.contiguous() for name, tensor in zip(_COLUMNS, tensors, strict=True)}
    if lexical_width <= 1 << 16:
        columns["places"] = columns["places"].to(torch.uint16)
    about = {"version": commit[0], "writer": commit[1], "crc": _crc(columns, commit)}
    path = keys_path(bank)
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        save_file(columns, unfinished, {"bank": json.dumps(about)})
        unfinished.chmod(0o600)
        unfinished.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def read_keys_file(bank: Path) -> KeysFile | None:
    """The keys beside a bank; None if there are none, or they are not what was written."""
    try:
        with safe_open(keys_path(bank), framework="pt") as file:
            about = json.loads(file.metadata()["bank"])
            columns = {name: file.get_tensor(name) for name in _COLUMNS}
        version, writer = about["version"], about["writer"]
        if _crc(columns, (version, writer)) != about["crc"] or not isinstance(version, int):
            return None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError):
        return None
    *listed, summaries, counts, places, weights, ends, posting_rows, posting_weights = columns.values()
    postings = ends, posting_rows, posting_weights
    return KeysFile(version, writer, Directory(*listed), Summaries(summaries, counts, places.int(), weights, postings))


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
