"""Removes what Chroma leaves of deleted documents in a folder.

A deleted document stays in the queue of changes, in the graph of vectors, in the index of words and on free pages of
the database. So the collection is copied, the copy takes its place, and the database is written anew.
"""

from __future__ import annotations

import os
import re
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

from mac_rag.atomic_files import UNFINISHED, private, remove_file, replace_file, sync_folder

COMPACTED = "mac_rag.compacted"  # name of the copy until it takes the place of the collection

_DATABASE = "chroma.sqlite3"
_GRAPH = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # name of the folder of a collection's graph
_HEADER = struct.Struct("<iQQQQ")  # of a graph: version, offset, capacity, number of documents, bytes of each
_DOCUMENTS = 1024  # documents that are copied at a time


def settle(client: Any, name: str) -> None:
    """Finishes or takes back a compaction of a collection that was interrupted."""
    names = [collection.name for collection in client.list_collections()]
    if COMPACTED in names and name in names:
        client.delete_collection(COMPACTED)
    elif COMPACTED in names:  # it is complete, and what it is a copy of has gone
        client.get_collection(COMPACTED, embedding_function=None).modify(name=name)


def copy_documents(source: Any, target: Any) -> None:
    """Copies all documents of a collection, with their vectors."""
    ids = source.get(include=[])["ids"]
    for first in range(0, len(ids), _DOCUMENTS):
        page = source.get(ids=ids[first : first + _DOCUMENTS], include=["embeddings", "documents", "metadatas"])
        target.upsert(**{name: page[name] for name in ("ids", "embeddings", "documents", "metadatas")})


def rewrite(folder: Path, *, secure_delete: bool) -> None:
    """Writes the database of a folder anew, and removes graphs that no collection has. No client may have it open.

    Raises:
        OSError: when a file cannot be written or removed.
        sqlite3.Error: when the database cannot be read.
    """
    path, new = folder / _DATABASE, folder / (_DATABASE + UNFINISHED)
    remove_file(new, secure_delete=secure_delete)
    os.close(private(str(new), os.O_CREAT | os.O_WRONLY))  # SQLite takes an empty file
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        used = {name for (name,) in database.execute("SELECT id FROM segments")}
        database.execute("VACUUM INTO ?", (str(new),))
    with closing(sqlite3.connect(new, isolation_level=None)) as database:
        # The index of words keeps those of deleted documents until its parts are merged.
        database.execute("PRAGMA journal_mode = MEMORY").fetchall()
        database.execute("PRAGMA secure_delete = ON").fetchall()
        database.execute("INSERT INTO embedding_fulltext_search(embedding_fulltext_search) VALUES ('optimize')")
        database.execute("PRAGMA journal_mode = DELETE").fetchall()
    with new.open("rb") as file:
        os.fsync(file.fileno())
    replace_file(new, path, secure_delete=secure_delete)
    sync_folder(folder)
    for graph in folder.iterdir():
        if not _GRAPH.fullmatch(graph.name) or not graph.is_dir() or graph.is_symlink():
            continue
        if graph.name in used:
            _clear_unused(graph)
            continue
        for part in graph.iterdir():
            remove_file(part, secure_delete=secure_delete)
        graph.rmdir()


def _clear_unused(graph: Path) -> None:
    """Overwrites the places of a graph that no document has: Chroma writes there what was in its memory."""
    header, path = graph / "header.bin", graph / "data_level0.bin"
    if not header.is_file() or not path.is_file() or header.stat().st_size < _HEADER.size:
        return
    with header.open("rb") as file:
        version, _, _, count, width = _HEADER.unpack(file.read(_HEADER.size))
    unused = path.stat().st_size - count * width
    if version == 1 and unused > 0:
        with path.open("r+b") as places:
            places.seek(count * width)
            places.write(bytes(unused))
            places.flush()
            os.fsync(places.fileno())
