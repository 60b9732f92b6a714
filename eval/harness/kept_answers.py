"""A cache of answers, so that no answer is generated twice.

Rows often have equal prompts: retrievers find the same documents, or more than fit into the window. An interrupted run
has most of its answers already. The key of an answer is a digest of the prompt, the memory weight and everything else
that determines it. So answers of other weights, another stream or other code are never found, and one file may hold
the answers of several runs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ValidationError

import mac_rag
from mac_rag.atomic_files import private
from mac_rag.config import Config
from mac_rag.errors import ConfigError, DataError

if TYPE_CHECKING:
    from eval.harness.scales import Protocol
    from mac_rag.data.types import Document
    from mac_rag.model import MACModel


class Prompt(NamedTuple):
    """A question as it is asked.

    Attributes:
        question: the question.
        contexts: the texts of the documents before it.
        as_of: the moment of the question; None for all documents.
        times_used: False for a memory that ignores times (`MACModel.without_times`).
    """

    question: str
    contexts: tuple[str, ...] = ()
    as_of: str | None = None
    times_used: bool = True


class KeptAnswer(Config):
    """One answer; `seconds` is the generation time of its batch, divided by the answers of the batch."""

    text: str
    seconds: float


class _Line(Config):
    key: str
    answer: KeptAnswer


_START = b'{"key":"'


class KeptAnswers:
    """The answers of one model after one stream.

    Args:
        path: a file of JSON Lines to read and to append to; None keeps the answers in memory only.
        source: digest of the model and the stream, from `answer_source`.

    Raises:
        ConfigError: if the file cannot be written.
        DataError: if the file holds anything but kept answers.
    """

    def __init__(self, path: Path | None = None, source: str = "") -> None:
        self._path = path
        self._source = source
        self._answers: dict[str, KeptAnswer] = {}
        if path is not None:
            self._read(path)

    def find(self, prompt: Prompt, weight: float | None) -> KeptAnswer | None:
        """The kept answer to a prompt with a memory weight lambda, or without memory for None; None if there is none.

        Answers without memory do not depend on the moment of the question.
        """
        return self._answers.get(self._key(prompt, weight))

    def add(self, answers: Mapping[Prompt, KeptAnswer], weight: float | None) -> None:
        """Keeps the answer to each prompt, and appends them to the file before it returns; `weight` as for `find`."""
        keyed = {self._key(prompt, weight): answer for prompt, answer in answers.items()}
        self._answers.update(keyed)
        if self._path is not None:
            with open(self._path, "ab", opener=private) as file:
                file.write(b"".join(_line(key, answer) for key, answer in keyed.items()))
                file.flush()
                os.fsync(file.fileno())

    def _key(self, prompt: Prompt, weight: float | None) -> str:
        question, contexts, as_of, times_used = Prompt(*prompt)
        key = [self._source, question, contexts, None if weight is None else as_of, weight]  # the LM alone has no date
        key += [] if times_used or weight is None else ["times unused"]
        return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]

    def _read(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a+b", opener=private) as file:
                file.seek(0)
                *lines, cut = file.read().split(b"\n")
                for number, line in enumerate(lines, 1):
                    self._take(line, f"{path}, line {number}")
                if cut[: len(_START)] != _START[: len(cut)]:
                    self._take(cut, f"{path}, line {len(lines) + 1}")
                file.truncate(file.tell() - len(cut))  # a last line that an interruption has cut
        except OSError as error:
            raise ConfigError(f"--answers {path} cannot be written: {error.strerror}") from None

    def _take(self, text: bytes, where: str) -> None:
        try:
            line = _Line.model_validate_json(text)
        except ValidationError:
            raise DataError(f"{where}: not a kept answer; give another file to --answers") from None
        self._answers[line.key] = line.answer


def _line(key: str, answer: KeptAnswer) -> bytes:
    return _Line(key=key, answer=answer).model_dump_json().encode() + b"\n"


def answer_source(model: MACModel, documents: Iterable[Document], protocol: Protocol = "strict") -> str:
    """Digest of all that determines answers: weights, configuration, device, stream, protocol, code of `mac_rag`."""
    from mac_rag.retrieval.encoders import weights_hash

    digest = hashlib.sha256(
        f"{weights_hash(model)} {model.config.model_dump_json()} {model.device} {protocol}".encode()
    )
    for document in documents:
        digest.update(json.dumps([document.id, document.text, str(document.date)]).encode())
    package = Path(mac_rag.__file__).parent
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()
