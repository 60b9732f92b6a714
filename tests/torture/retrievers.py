"""Folders of retrievers, damaged with and without checksums that fit the damage."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as array_bytes

from mac_rag.data.types import Document
from mac_rag.retrieval import BM25Retriever, DenseRetriever, snapshot
from mac_rag.retrieval.dense import Vectors
from tests.torture.mutations import Mutations, Way, damage_bytes, damage_json, damage_kind, mutate_json, refusal

_DOCUMENTS = [Document(name, f"the {name} opened a bridge", {"year": 2004, "tags": [[1.5]]}) for name in "abcdef"]


class _Lengths:
    """An encoder that sees how long a text is."""

    width = 3
    fingerprint = "lengths"

    def documents(self, texts: Sequence[str], advance: Callable[[int], None] | None = None) -> Vectors:
        return np.array([[len(text), text.count("e"), 1] for text in texts], dtype=np.float32).reshape(-1, 3)

    questions = documents


class Torture(Mutations):
    """BM25, vectors, and vectors that were not saved yet."""

    def make(self, place: Path) -> list[Path]:
        bm25, dense, begun = place / "bm25" / "texts", place / "dense" / "texts", place / "begun" / "texts"
        words = BM25Retriever()
        words.add(_DOCUMENTS)
        words.save(bm25)
        vectors = DenseRetriever(_Lengths())
        vectors.add(_DOCUMENTS)
        vectors.save(dense)
        DenseRetriever(_Lengths(), folder=begun).add(_DOCUMENTS)
        return [bm25, dense, begun]

    def ways(self, folder: Path, *, sealed: bool) -> Sequence[Way]:
        has_manifest = (folder / snapshot.MANIFEST).is_file()
        if sealed:
            return [_body, _body, _arrays] if has_manifest else []
        return [damage_bytes, damage_kind, *([damage_json] if has_manifest else [])]

    def check(self, folder: Path) -> None:
        """Loads the retriever and uses it. Cached vectors that are damaged are computed again."""
        if any(path.name.endswith(".part.safetensors") for path in folder.iterdir()):
            retriever = DenseRetriever(_Lengths(), folder=folder)
            if refusal(lambda: retriever.add(_DOCUMENTS)) is None:
                expected = _Lengths().documents([document.text for document in _DOCUMENTS])
                assert np.array_equal(retriever._matrix[: len(expected)], expected)
        loads = [BM25Retriever.load, lambda place: DenseRetriever.load(place, _Lengths())]
        for load in loads:
            refused = refusal(lambda load=load: _use(folder, load))
            assert refused is None or len(refused) < 5_000


def _use(folder: Path, load: Callable[[Path], Any]) -> None:
    retriever = load(folder)
    for hits in retriever.retrieve(["the bridge", ""], k=20):
        assert all(np.isfinite(hit.score) and isinstance(hit.text, str) for hit in hits)
    assert len(retriever.content_hashes()) == len(retriever)
    retriever.put([_DOCUMENTS[0], Document("new", "another bridge")])
    retriever.save(folder)
    load(folder)


def _body(folder: Path, rng: random.Random) -> str:
    manifest = json.loads((folder / snapshot.MANIFEST).read_bytes())
    manifest["body"] = mutate_json(json.loads(manifest["body"]), rng)
    _write(folder, manifest)
    return str(manifest["body"])[:300]


def _arrays(folder: Path, rng: random.Random) -> str:
    """Other arrays, or an array with other numbers, under a name that fits."""
    manifest = json.loads((folder / snapshot.MANIFEST).read_bytes())
    arrays = load_arrays((folder / f"{manifest['arrays']}.safetensors").read_bytes())
    name = rng.choice(sorted(arrays))
    values = arrays[name].copy()
    match rng.randrange(6):
        case 0:
            del arrays[name]
        case 1:
            arrays[name] = values[:-1]
        case 2:
            arrays[name] = values.astype(rng.choice([np.float64, np.int32, np.uint8, np.float16]))
        case 3:
            arrays[name] = values.reshape(-1, 1) if values.ndim == 1 else values.T.copy()
        case _:
            numbers = (
                (np.nan, np.inf, -1e30) if values.dtype == np.float32 else (-1, 2**31 - 1, np.iinfo(values.dtype).min)
            )
            values.flat[rng.randrange(values.size)] = rng.choice(numbers)
            arrays[name] = values
    data = array_bytes({key: np.ascontiguousarray(array) for key, array in arrays.items()})
    manifest["arrays"] = hashlib.sha256(data).hexdigest()
    (folder / f"{manifest['arrays']}.safetensors").write_bytes(data)
    _write(folder, manifest)
    return f"{name} {arrays.get(name)!r:.200}"


def _write(folder: Path, manifest: dict[str, Any]) -> None:
    parts = (manifest["kind"], manifest["arrays"], manifest["body"])
    manifest["sha256"] = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    (folder / snapshot.MANIFEST).write_text(json.dumps(manifest))
