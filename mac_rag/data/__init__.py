"""Data sets of documents with questions: five benchmarks, a generator, and a user's own files, all as `QADataset`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mac_rag.data import archivalqa, own, realtimeqa, squad, timeqa
from mac_rag.data.newswire import generate
from mac_rag.data.types import QADataset, first_documents
from mac_rag.errors import ConfigError, DataError

SPLITS = {
    "newswire": generate.SPLITS,
    "squad": squad.SPLITS,
    "streamingqa": archivalqa.STREAMINGQA_SPLITS,
    "archivalqa": archivalqa.SPLITS,
    "timeqa": timeqa.SPLITS,
    "realtimeqa": realtimeqa.SPLITS,
    "own": own.SPLITS,
}
_READERS = {
    "squad": squad.read_squad,
    "streamingqa": archivalqa.read_streamingqa,
    "archivalqa": archivalqa.read_archivalqa,
    "timeqa": timeqa.read_timeqa,
    "realtimeqa": realtimeqa.read_realtimeqa,
}


def load_dataset(
    name: str,
    split: str,
    path: str | Path | None = None,
    *,
    documents: int | None = None,
    columns: Mapping[str, str] | None = None,
    unanswered: bool = False,
) -> QADataset:
    """Loads one split of a data set.

    Args:
        name: `newswire` (generated, needs no file), `squad`, `streamingqa`, `archivalqa`, `timeqa`,
            `realtimeqa`, or `own` for a user's files in one of the forms of `mac_rag.data.own.find_files`.
        split: one of `SPLITS[name]`.
        path: folder of the data set's files, or file of this split; None for newswire. For `own` also
            `hub:OWNER/NAME`.
        documents: most documents to load: the first ones of the stream with their questions; None for all. newswire
            generates exactly so many documents.
        columns: field -> the column that holds it, if their names differ; `own` only. See `mac_rag.data.own.FIELDS`.
        unanswered: True to also read questions without answers, which only `own` may have.

    Raises:
        ConfigError: for an unknown data set or split, fewer than one document, a missing path, or an argument that the
            data set does not take.
        DataError: for a file that is missing, malformed or empty.

    Examples:
        >>> from mac_rag.data import load_dataset
        >>> dataset = load_dataset("newswire", "test", documents=3)
        >>> len(dataset.documents), dataset.questions[0].document_id == dataset.documents[0].id
        (3, True)
    """
    if name not in SPLITS:
        raise ConfigError(f"unknown data set {name!r}; choose one of {', '.join(SPLITS)}")
    if split not in SPLITS[name]:
        raise ConfigError(f"{name} has no split {split!r}; choose one of {', '.join(SPLITS[name])}")
    if documents is not None and documents < 1:
        raise ConfigError(f"documents must be at least 1, got {documents}")
    if columns and name != "own":
        raise ConfigError(f"columns are for data of your own; the files of {name} have fixed names; leave columns out")
    if name == "newswire":
        if path is not None:
            raise ConfigError(
                f"newswire is generated and reads no path, got {path}; load a file of newswire as archivalqa"
            )
        return generate.generate(split, documents or generate.STREAM_LENGTH)
    if path is None:
        raise ConfigError(f"{name} needs the path of its files; give it")
    if name == "own":
        dataset = own.read_own(path, split, columns, unanswered=unanswered)
    else:
        dataset = _READERS[name](path, split)
    if not dataset.questions:
        raise DataError(f"the split {split!r} of {name} in {path} holds no questions; choose another split or path")
    return dataset if documents is None else first_documents(dataset, documents)
