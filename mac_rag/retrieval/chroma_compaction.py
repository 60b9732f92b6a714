"""Removes what Chroma leaves of deleted documents in a folder.

A deleted document stays in the queue of changes, in the graph of vectors, in the index of words and on free pages of
the database. So the collection is copied, the copy takes its place, and the database is written anew. A graph has
unfilled places, too, into which Chroma writes what was in the memory of its process; these are overwritten.
"""

from __future__ import annotations

import os
import re
import sqlite3
import struct
from collections.abc import Container
from contextlib import closing
from pathlib import Path
from typing import Any

from mac_rag.atomic_files import UNFINISHED, overwrite, private, remove_file, replace_file, sync_folder

COMPACTED = "mac_rag.compacted"  # name of the copy until it takes the place of the collection

_DATABASE = "chroma.sqlite3"
_GRAPH = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # name of the folder of a collection's graph
_HEADER = struct.Struct("<iQQQQ")  # of a graph: version, offset, capacity, number of documents, bytes of each
_LENGTH_BYTES = 4  # of a vector's length, which a graph keeps for cosine similarity
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


def rewrite(folder: Path, name: str, *, secure_delete: bool) -> set[str]:
    """Writes the database of a folder anew, and removes graphs that no collection has. No client may have it open.

    Returns:
        Names of the folders of graphs that belong to the collection `name`.

    Raises:
        OSError: when a file cannot be written or removed.
        sqlite3.Error: when the database cannot be read.
    """
    path, new = folder / _DATABASE, folder / (_DATABASE + UNFINISHED)
    remove_file(new, secure_delete=secure_delete)
    os.close(private(str(new), os.O_CREAT | os.O_WRONLY))  # SQLite takes an empty file
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        owners = "SELECT segments.id, name FROM segments LEFT JOIN collections ON collection = collections.id"
        used = dict(database.execute(owners))
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
    for graph in _graphs(folder):
        if graph.name not in used:
            for part in graph.iterdir():
                remove_file(part, secure_delete=secure_delete)
            graph.rmdir()
    return {graph for graph, owner in used.items() if owner == name}


def clear_unused(folder: Path, own: Container[str]) -> None:
    """Overwrites the places of a folder's graphs that no document has. Nobody may write to the folder meanwhile.

    Chroma fills them when it writes a graph anew, as it does with a small one whenever it opens it.

    Args:
        folder: Chroma's folder.
        own: names of the folders of graphs that compare by dot product: no vector's length is ever put into them.

    Raises:
        OSError: when a file cannot be written.
    """
    for graph in _graphs(folder):
        header = graph / "header.bin"
        if not header.is_file() or header.stat().st_size < _HEADER.size:
            continue
        with header.open("rb") as file:
            version, _, _, count, width = _HEADER.unpack(file.read(_HEADER.size))
        if version == 1:
            lengths = 0 if graph.name in own else count * _LENGTH_BYTES
            for file_name, used in (("data_level0.bin", count * width), ("length.bin", lengths)):
                if (graph / file_name).is_file():
                    overwrite(graph / file_name, used)


def _graphs(folder: Path) -> list[Path]:
    return [
        path for path in folder.iterdir() if _GRAPH.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]
