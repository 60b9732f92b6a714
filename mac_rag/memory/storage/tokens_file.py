"""The file of a segment's rows: the columns of `mac_rag.memory.rows` one after the other, as safetensors.

Its header repeats the ids of the documents of each entry, for a segment that has lost its records.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from mac_rag.memory.entry_table import Record
from mac_rag.memory.rows import RowLayout, Rows
from mac_rag.memory.storage.manifest import SegmentInfo
from mac_rag.untrusted_files import MalformedError, file_digest, open_file, parse_json

_PIECE = 1 << 20
_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8"}


def header(records: Sequence[Record], layout: RowLayout, shape: Sequence[int], places: int) -> bytes:
    """The header of a safetensors file, padded so that the columns behind it are aligned.

    Args:
        records: the records of all entries.
        layout: how the bank keeps its rows.
        shape: `[n, T, D]` of memory tokens.
        places: W.
    """
    entries = [(record.sequence, record.document_ids) for record in records]
    content: dict[str, object] = {"__metadata__": {"format": "pt", "entries": json.dumps(entries)}}
    start = 0
    for name, (dtype, column) in layout.columns(shape, places).items():
        stop = start + dtype.itemsize * math.prod(column)
        content[name] = {"dtype": _KINDS[dtype], "shape": column, "data_offsets": [start, stop]}
        start = stop
    data = json.dumps(content).encode()
    data += b" " * (-len(data) % 8)
    return len(data).to_bytes(8, "little") + data


def entry_ids(data: bytes) -> dict[int, tuple[str, ...]]:
    """The document ids of each entry by sequence number, read from a header.

    Raises:
        MalformedError: when it is not such a header.
    """
    content = parse_json(data[8:])
    try:
        entries = parse_json(content["__metadata__"]["entries"])
        named = {sequence: tuple(ids) for sequence, ids in entries}
    except (KeyError, TypeError, ValueError):
        raise MalformedError("its header names no entries") from None
    if not all(type(sequence) is int and all(isinstance(name, str) for name in ids) for sequence, ids in named.items()):
        raise MalformedError("its header names entries by other types")
    return named


def map_rows(folder: Path, info: SegmentInfo, layout: RowLayout) -> Rows:
    """The rows of a segment, memory-mapped. Nothing of them has been read, let alone verified.

    Raises:
        MalformedError: when the file has another size, or begins otherwise, than the manifest says.
        FileNotFoundError: when it is missing.
    """
    with open_file(folder / info.tokens_file) as file:
        _check_size(file, info, layout)
        # A private mapping: torch has no read-only tensors, and the file must never change.
        return rows_of(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), info, layout)


def check_file(folder: Path, info: SegmentInfo) -> None:
    """Reads every byte of the file.

    Raises:
        MalformedError: when they are not what was written.
        FileNotFoundError: when it is missing.
    """
    if file_digest(folder / info.tokens_file) != info.tokens:
        raise MalformedError("its checksum differs from the manifest's")


def load_rows(folder: Path, info: SegmentInfo, layout: RowLayout) -> Rows:
    """The rows of a segment, read into memory and held against the manifest in one pass.

    Raises:
        MalformedError: when the file is not what the manifest says.
        FileNotFoundError: when it is missing.
    """
    content, digest = bytearray(), hashlib.sha256()
    with open_file(folder / info.tokens_file) as file:
        _check_size(file, info, layout)
        file.seek(0)
        while piece := file.read(_PIECE):
            digest.update(piece)
            content += piece
    if digest.hexdigest() != info.tokens:
        raise MalformedError("its checksum differs from the manifest's")
    rows = rows_of(content, info, layout)
    if (fault := rows.fault(layout, info.shape[-1])) is not None:
        raise MalformedError(fault)
    return rows


def rows_of(content: bytearray | mmap.mmap, info: SegmentInfo, layout: RowLayout) -> Rows:
    """The rows whose columns begin at a segment's offset in a file's bytes."""
    columns, offset = {}, info.offset
    for name, (dtype, shape) in layout.columns(info.shape, info.places).items():
        count = math.prod(shape)
        column = torch.frombuffer(content, dtype=dtype, count=count, offset=offset) if count else torch.empty(0)
        columns[name] = column.to(dtype).view(shape)
        offset += count * dtype.itemsize
    return Rows(columns)


def read_entry(file: BinaryIO, info: SegmentInfo, layout: RowLayout, start: int, count: int) -> Rows | None:
    """Some rows of a file that may be damaged, whatever they are; None if it ends before.

    Args:
        file: the file.
        info: what the manifest says about the segment.
        layout: how the bank keeps its rows.
        start: the first of the rows.
        count: how many they are.
    """
    columns, offset = {}, info.offset
    for name, (dtype, shape) in layout.columns(info.shape, info.places).items():
        width = dtype.itemsize * math.prod(shape[1:])
        file.seek(offset + start * width)
        data = bytearray(file.read(count * width))
        if len(data) < count * width:
            return None
        column = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        columns[name] = column.view(count, *shape[1:])
        offset += shape[0] * width
    return Rows(columns)


def _check_size(file: BinaryIO, info: SegmentInfo, layout: RowLayout) -> None:
    size, expected = os.fstat(file.fileno()).st_size, info.offset + info.rows_bytes(layout)
    if size != expected:
        raise MalformedError(f"it has {size:,} bytes, and by the manifest {expected:,}")
    begin = 8 + int.from_bytes(file.read(8), "little")
    if begin != info.offset:
        raise MalformedError(f"its tensor begins at byte {begin:,}, and by the manifest {info.offset:,}")
