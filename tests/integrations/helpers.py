"""Helpers of the tests with LlamaIndex and LangChain, all offline."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from llama_index.core import Document
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index_instrumentation.base import BaseEvent
from llama_index_instrumentation.event_handlers import BaseEventHandler

from mac_rag.engine import Answer, MACEngine
from mac_rag.integrations import framework
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import MACModel

FACTS = {
    "bridge": "Anna Berg opened the bridge of Norrland in May.",
    "museum": "The museum of Sola is led by Peter Holm.",
    "river": "A ferry crosses the river Vest every hour.",
}

NEWS = {  # which mac-tiny reads
    "press": "Edgar Flara will join the board of Rainga Press. The company employs 180 people.",
    "storm": "A storm has hit Wunville.",
    "bridge": "Basalt Bridge was opened by Ines Kaur in the spring.",
    "match": "Irene Searkwell struck the first goal.",
}

QUESTION = "Who opened the bridge of Norrland?"


def forget_warnings() -> None:
    """Allows every warning once more."""
    framework._topics.clear()


class HashEmbedding(BaseEmbedding):
    """Embeddings of hashed bags of words: deterministic, and texts that share words are near each other."""

    def _embed(self, text: str) -> list[float]:
        vector = [0.0] * 64
        for word in re.findall(r"\w+", text.lower()):
            vector[hashlib.sha256(word.encode()).digest()[0] % 64] += 1.0
        return vector

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._embed(text)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._embed(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._embed(query)


class RecordingEngine(MACEngine):
    """The real engine; it notes every question with its contexts, and can be held up before it answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: list[tuple[str, tuple[str, ...] | None]] = []
        self.gate = threading.Event()
        self.gate.set()

    def _note(self, question: str | FittedPrompt, contexts: Sequence[str] | None) -> None:
        if isinstance(question, FittedPrompt):
            question, contexts = question.question, question.contexts
        self.asked.append((question, None if contexts is None else tuple(contexts)))

    def answer(self, questions: Sequence[str | FittedPrompt], **options: Any) -> list[Answer]:
        for question, contexts in zip(questions, options.get("contexts") or [None] * len(questions)):
            self._note(question, contexts)
        assert self.gate.wait(timeout=20), "the event loop was blocked"
        return super().answer(questions, **options)

    def stream(self, question: str | FittedPrompt, **options: Any) -> Iterator[str]:
        self._note(question, options.get("contexts"))
        pieces = super().stream(question, **options)
        return self._held(pieces)

    def _held(self, pieces: Iterator[str]) -> Iterator[str]:
        for piece in pieces:
            yield piece
            assert self.gate.wait(timeout=20), "the event loop was blocked"


class EventLog(BaseEventHandler):
    """Collects instrumentation events."""

    events: list[Any]

    @classmethod
    def class_name(cls) -> str:
        return "EventLog"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.events.append(event)

    def names(self) -> list[str]:
        return [event.class_name() for event in self.events]


def reference(engine: RecordingEngine, *contexts: str, **options: Any) -> str:
    """What the engine itself answers to the question, with these contexts if there are any."""
    given = {"contexts": [contexts]} if contexts else {}
    text = engine.answer([QUESTION], **given, **options)[0].text
    engine.asked.clear()
    return text


def facts(**changed: str) -> list[Document]:
    """The facts as LlamaIndex documents, some with another text."""
    return [Document(id_=name, text=text, metadata={"name": name}) for name, text in {**FACTS, **changed}.items()]


def scored(*names: str, score: float | None = 0.5) -> list[NodeWithScore]:
    """Retrieved nodes: whole documents by their names."""
    return [NodeWithScore(node=TextNode(id_=name, text=FACTS.get(name, name)), score=score) for name in names]


def user(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.USER, content=text)


class Script:
    """Makes an instruct LM say a known reply, token by token, and end its turn, by replacing its logits.

    Everything around these is real: chat template, tokenizer, prefix, decoding.

    Attributes:
        replies: a reply by words that occur in the prompt; the first that do decide.
        prompts: the texts of the prompts that the LM has read, with their control tokens.
        ids: the token ids of these prompts.
        prefixes: tokens of memory in front of each prompt.
    """

    def __init__(self, model: MACModel, replies: Mapping[str, str]) -> None:
        self.replies = dict(replies)
        self.prompts: list[str] = []
        self.ids: list[list[int]] = []
        self.prefixes: list[int] = []
        self._tokenizer = model.base_lm.tokenizer
        self._left: list[int] = []
        model.base_lm.model.register_forward_pre_hook(self._read, with_kwargs=True)
        model.base_lm.model.register_forward_hook(self._say)

    def _read(self, lm: Any, arguments: Any, options: dict[str, Any]) -> None:
        ids, cache = options["input_ids"], options["past_key_values"]
        if ids.shape[1] == 1:
            return
        self.prompts.append(self._tokenizer.decode(ids[0]))
        self.ids.append(ids[0].tolist())
        self.prefixes.append(0 if cache is None else cache.get_seq_length())
        reply = next((reply for words, reply in self.replies.items() if words in self.prompts[-1]), "I don't know.")
        end = self._tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._left = [*self._tokenizer(reply, add_special_tokens=False).input_ids, end]

    def _say(self, lm: Any, arguments: Any, output: Any) -> None:
        output.logits = torch.full_like(output.logits, -100.0)
        output.logits[:, -1, self._left.pop(0)] = 100.0

    def turns(self, place: int = -1) -> list[tuple[str, str]]:
        """Role and text of each message of a prompt."""
        *said, start = self.prompts[place].split("<|im_start|>")[1:]
        assert start == "assistant\n"
        parted = [message.removesuffix("<|im_end|>\n").partition("\n") for message in said]
        return [(role, text) for role, _, text in parted]


def scripted(model: MACModel, replies: Mapping[str, str]) -> tuple[MACEngine, Script]:
    """An engine whose LM follows a script."""
    return MACEngine(model), Script(model, replies)
