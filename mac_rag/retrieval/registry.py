"""Retrievers by name, for command lines and recipes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mac_rag.errors import ConfigError
from mac_rag.retrieval import snapshot
from mac_rag.retrieval.base import Retriever
from mac_rag.retrieval.bm25 import BM25Retriever
from mac_rag.retrieval.dense import DenseRetriever, Encoder
from mac_rag.retrieval.hybrid import HybridRetriever

_SENTENCE_TRANSFORMERS = "sentence-transformers:"
_CHROMA = "chroma:"
# Name of a dense retriever -> function that makes its encoder. It gets the module `encoders`, which is imported lazily.
_ENCODERS: dict[str, Callable[[Any], Encoder]] = {
    "contriever": lambda encoders: encoders.contriever("facebook/contriever"),
    "contriever-msmarco": lambda encoders: encoders.contriever("facebook/contriever-msmarco"),
    "dpr": lambda encoders: encoders.dpr(),
    "minilm": lambda encoders: encoders.minilm(),
}

# The names that `make_retriever` takes, for help texts and messages.
RETRIEVERS = (
    "none", "bm25", "contriever", "contriever-msmarco", "dpr", "minilm", "hybrid", "sentence-transformers:MODEL",
    "chroma:FOLDER", "chroma:http://HOST:PORT", "module:attr",
)  # fmt: skip


def make_retriever(spec: str, *, folder: Path | None = None, progress: bool = False) -> Retriever | None:
    """Makes a retriever by its name.

    Args:
        spec: `none`; `bm25`; `contriever`, `contriever-msmarco`, `dpr` (from the Hub); `minilm` (from an installed
            package); `hybrid`, which fuses bm25 and minilm; `sentence-transformers:MODEL` for the name or folder of a
            model; `chroma:FOLDER`, `chroma:http://HOST:PORT` or `chroma:http://HOST:PORT/COLLECTION` for vectors of
            minilm in Chroma; `module:attr` for an importable `Retriever`, LlamaIndex retriever or LlamaIndex index, or
            a function without arguments that makes one.
        folder: folder of the retriever. A retriever that was saved there is loaded. A dense retriever writes vectors
            there while it encodes. None for a new retriever in memory. Ignored for Chroma, whose name holds its folder
            or address, and for `module:attr`.
        progress: True to show a progress bar while documents are encoded.

    Returns:
        The retriever; None for `none`.

    Raises:
        ConfigError: for an unknown name; lists the names.
        ModelLoadError: if an encoder cannot be loaded.
        BankError: if `folder` holds another retriever, or is damaged; if Chroma cannot be reached.
    """
    if spec == "none":
        return None
    if spec == "bm25":
        return BM25Retriever.load(folder) if folder is not None and snapshot.exists(folder) else BM25Retriever()
    if spec == "hybrid":
        parts = [
            make_retriever(name, folder=None if folder is None else folder / str(index), progress=progress)
            for index, name in enumerate(("bm25", "minilm"))
        ]
        return HybridRetriever([part for part in parts if part is not None])
    if spec.startswith(_CHROMA) and spec != _CHROMA:
        from mac_rag.retrieval import encoders
        from mac_rag.retrieval.chroma import ChromaRetriever

        return ChromaRetriever(spec.removeprefix(_CHROMA), encoders.minilm())
    make = _encoder(spec)
    if make is None:
        return _imported(spec)
    if folder is not None and snapshot.exists(folder):
        return DenseRetriever.load(folder, make(), progress=progress)
    return DenseRetriever(make(), folder=folder, progress=progress)


def check_name(spec: str) -> None:
    """Checks that `make_retriever` knows a name, without loading a model.

    Raises:
        ConfigError: for an unknown name; lists the names.
    """
    if spec != "none" and not needs_folder(spec) and (not spec.startswith(_CHROMA) or spec == _CHROMA):
        _import(spec)


def needs_folder(spec: str) -> bool:
    """True if a retriever of this name is in memory and must be saved to a folder to persist."""
    return spec in ("bm25", "hybrid") or _encoder(spec) is not None


def make_encoder(spec: str) -> Encoder:
    """The encoder of a dense retriever, by the retriever's name.

    Raises:
        ConfigError: for a name that is not one of a dense retriever.
        ModelLoadError: if the encoder cannot be loaded.
    """
    make = _encoder(spec)
    if make is None:
        names = ", ".join((*_ENCODERS, f"{_SENTENCE_TRANSFORMERS}MODEL"))
        raise ConfigError(f"unknown encoder {spec!r}; choose one of {names}")
    return make()


def _encoder(spec: str) -> Callable[[], Encoder] | None:
    """A function that makes the encoder of a dense retriever; None if `spec` does not name one."""
    if spec not in _ENCODERS and not spec.startswith(_SENTENCE_TRANSFORMERS):
        return None
    from mac_rag.retrieval import encoders

    if spec in _ENCODERS:
        return lambda: _ENCODERS[spec](encoders)
    return lambda: encoders.SentenceTransformerEncoder(spec.removeprefix(_SENTENCE_TRANSFORMERS))


def _import(spec: str) -> Any:
    """The object that `module:attr` names."""
    if not all(spec.partition(":")):
        raise ConfigError(f"unknown retriever {spec!r}; choose one of {', '.join(RETRIEVERS)}")
    try:
        return import_object(spec)
    except ConfigError as error:
        raise ConfigError(
            f"cannot import retriever {spec!r}: {error.__cause__}; choose one of {', '.join(RETRIEVERS)}, where "
            "module:attr is an importable module and a name in it"
        ) from error


def _imported(spec: str) -> Retriever:
    """The retriever that `module:attr` names or makes."""
    value = _import(spec)
    source = value if isinstance(value, Retriever) or not callable(value) else value()
    if isinstance(source, Retriever):
        return source
    try:
        from llama_index.core.indices.base import BaseIndex
        from llama_index.core.retrievers import BaseRetriever

        from mac_rag.retrieval.llama_index import LlamaIndexRetriever
    except ImportError:
        pass
    else:
        if isinstance(source, BaseRetriever | BaseIndex):
            return LlamaIndexRetriever(source)
    raise ConfigError(
        f"{spec!r} is {type(source).__name__}, neither a mac_rag Retriever nor a LlamaIndex retriever or index; name "
        "one of these, or a function that makes one"
    )


def import_object(spec: str) -> Any:
    """Imports the object that `module:attr` names: an importable module, and a name in it, which may be dotted.

    Examples:
        >>> import_object("json:decoder.JSONDecoder").__name__
        'JSONDecoder'

    Raises:
        ConfigError: for a name that has another form or cannot be imported.
    """
    module, colon, attribute = spec.partition(":")
    if not (colon and module and attribute):
        raise ConfigError(f"{spec!r} names no object; write module:attr")
    try:
        value: Any = importlib.import_module(module)
        for name in attribute.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot import {spec!r}: {error}") from error
    return value
