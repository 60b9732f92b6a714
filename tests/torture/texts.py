"""Texts as they come: every part of the library keeps a text exactly, or refuses it by name and place."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from llama_index.core.schema import Document as IndexDocument
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from pydantic import ValidationError
from typer.main import get_command
from typer.testing import CliRunner, Result

from mac_rag.bank import MemoryBank
from mac_rag.cli.main import app
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import BankError, DocumentError, MACError
from mac_rag.integrations.llama_index import MACLLM, MACNodePostprocessor, MACVectorStore, MemoryWriter
from mac_rag.model import MACModel
from mac_rag.retrieval import BM25Retriever
from mac_rag.untrusted_files import ROW
from tests.helpers import mac_config, save_llama
from tests.torture.part import Part

PIECES = [
    "A storm has hit Wunville. ", "word", " ", "\n", "\t", "\r\n", "\0", "\x1b[31m", "\x1b]0;title\x07", "\x7f", "\x85",
    "\x9b", "\x1c\x1d", "\N{LINE SEPARATOR}", "\N{NO-BREAK SPACE}", "\N{IDEOGRAPHIC SPACE}", "\N{ZERO WIDTH SPACE}",
    "\N{ZERO WIDTH NO-BREAK SPACE}", "\N{RIGHT-TO-LEFT OVERRIDE}", "\N{FIRST STRONG ISOLATE}", "\ud83d", "\ude00",
    "\udc80", "e\N{COMBINING ACUTE ACCENT}", "\N{COMBINING TILDE}", "مرحبا بالعالم ", "שלום", "👩‍👩‍👧‍👦", "👍🏽", "🇫🇷",
    "क्षि", "漢字かな。", "각", "\N{REPLACEMENT CHARACTER}", "\uffff", "\U0010ffff", "\ue000", "ﷺ", "ß", "İ", "</s>",
    "<|im_end|>", "[SEP]", "{question}", "<s>", '"}\n{"id": "x"', "\\u0000", "[bold]", "%s%n", "../../x", "Ab3/",
]  # fmt: skip

# What must not reach a terminal: controls, separators, and characters that reorder a line.
_CONTROLS = {
    chr(code) for code in (*range(32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


def texts(seed: int, count: int) -> Iterator[str]:
    """Yields nasty texts: mixtures, repetitions of one piece, any code points, and now and then a huge word."""
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.random()
        if kind < 0.5:
            yield "".join(draw.choices(PIECES, k=draw.randrange(12)))
        elif kind < 0.75:
            yield draw.choice(PIECES) * draw.choice([1, 2, 50, 1000])
        elif kind < 0.995:
            yield "".join(chr(draw.randrange(draw.choice([0x20, 0x100, 0x110000]))) for _ in range(draw.randrange(40)))
        else:
            yield draw.choice(["x", "漢", "Ab3/", "\N{COMBINING TILDE}", "👩‍👩‍👧‍👦", "a\t"]) * draw.randrange(
                10_000, 250_000
            )


def storable(text: str) -> bool:
    """The oracle: True for a text that can be kept, in any place."""
    return not any(character == "\0" or 0xD800 <= ord(character) < 0xE000 for character in text)


def readable(text: str) -> bool:
    """The oracle: True for a text that can be a document, a question or an id."""
    visible = (unicodedata.category(character) not in ("Cc", "Cf", "Zs", "Zl", "Zp") for character in text)
    return storable(text) and any(visible)


class Torture(Part):
    """Nasty texts in every place where a text can stand."""

    limit = 300.0

    def __init__(self, place: Path) -> None:
        config = mac_config(save_llama(place / "lm"), max_new_tokens=4)
        self._model = MACModel.from_config(config, device="cpu")

    def kind(self, seed: int) -> str:
        text = _text(seed)
        return "readable" if readable(text) else "storable" if storable(text) else "neither"

    def trial(self, seed: int) -> None:
        with patch("typer.testing._get_command", lambda app: _command()):  # making it takes half of the time
            check(_text(seed), self._model)


@cache
def _command() -> Any:
    return get_command(app)


def _text(seed: int) -> str:
    return next(texts(seed, 1))


def check(text: str, model: MACModel) -> None:
    """Checks engine, command line and LlamaIndex components with a text in every place where one can stand.

    Args:
        text: any text.
        model: a small model.
    """
    _check_engine(text, model)
    _check_command_line(text, model)
    _check_llama_index(text, model)


def _decided(accepted: bool, act: Callable[[], object], *names: str) -> bool:
    """Checks that something is done, or refused in a message with these names; returns whether it is done."""
    refusal = None
    try:
        act()
    except (BankError, DocumentError) as error:
        refusal = str(error)
    assert (refusal is None) == accepted, refusal
    if refusal is not None:
        assert all(name in refusal for name in names), refusal
        refusal.encode()  # it can be printed
    return accepted


def _place(text: str) -> str:
    """Where a text has its first character that cannot be kept, as messages say it; nothing for a blank text."""
    if "\0" in text:
        return f"index {text.index(chr(0))} "
    return next((f"index {place} " for place, character in enumerate(text) if not storable(character)), "")


def _check_engine(text: str, model: MACModel) -> None:
    engine = MACEngine(model, retriever=BM25Retriever())
    engine.adapt([Document("known", "A storm has hit Wunville.")])
    version = engine.bank.version

    def adapt(*documents: Document) -> Callable[[], object]:
        return lambda: engine.adapt([Document("before", "Rain fell on Kell."), *documents])

    if _decided(readable(text), adapt(Document("bad", text)), "'bad'", _place(text)):
        assert engine.retriever is not None
        [kept] = engine.retriever.documents(["bad"])
        assert kept.text == text
        engine.forget("bad")
    if _decided(readable(text), adapt(Document(text, "Fog lay on Ulm.")), _place(text)):
        assert engine.bank.document_ids[-1] == text
        engine.forget(text)
    metadata = {"note": [text, {text: 7**700}]}
    if _decided(storable(text), adapt(Document("bad", "Fog.", metadata)), "'bad'", _place(text)):
        assert engine.bank["bad"].metadata == metadata
        engine.forget("bad")
    if not storable(text):
        assert (engine.bank.version, engine.bank.document_ids) == (
            version,
            ["known"],
        )  # nothing of a refused call is done
    ask = [
        lambda: engine.answer([text], overflow="truncate", max_new_tokens=1),
        lambda: list(engine.stream(text, max_new_tokens=1)),
        lambda: engine.document_attention([text]),
        lambda: engine.answer(["Who?"], contexts=[[text]], overflow="truncate", max_new_tokens=1),
    ]
    for act in ask[: 3 if len(text) < 60 else 0]:
        _decided(readable(text), act, _place(text))
    _decided(storable(text), ask[3], _place(text))


def _check_command_line(text: str, model: MACModel) -> None:
    with TemporaryDirectory() as name, patch.object(MACModel, "from_pretrained", lambda *_, **__: model):
        folder = Path(name)

        def run(*command: str, last: object = "Who?") -> Result:
            return CliRunner().invoke(app, [*command, "--bank", str(folder / "bank"), "--", str(last)])

        written = json.dumps(text)
        text = json.loads(written)  # two halves of a surrogate pair have become a character

        def adapt(*rows: dict[str, str]) -> Result:
            lines = [json.dumps({"id": "before", "text": "Rain."}), *map(json.dumps, rows)]
            (folder / "rows.jsonl").write_text("\n".join(lines))
            return run("adapt", last=folder / "rows.jsonl")

        kept = []
        for accepted, row in (
            (readable(text), {"id": text, "text": "Fog.", "note": ""}),
            (readable(text), {"id": "body", "text": text, "note": ""}),
            (storable(text), {"id": "note", "text": "Fog.", "note": text}),
        ):
            too_long = len(json.dumps(row)) > ROW  # an emoji is twelve bytes
            if accepted and not too_long:
                kept.append(row)
                continue
            result = adapt(row)
            assert isinstance(result.exception, MACError), result.output
            assert ("line 2 has more than" if too_long else _place(text)) in str(result.exception)
            assert not (folder / "bank").exists()
        if not kept:
            return
        outputs = [adapt(*kept), CliRunner().invoke(app, ["bank", "list", "--bank", str(folder / "bank")])]
        listed = [json.loads(line)["documents"][0] for line in outputs[1].stdout.split("\n")[:-1]]
        assert [(one["id"], one["metadata"]) for one in listed[1:]] == [
            (row["id"], {"note": row["note"]}) for row in kept
        ]
        outputs += [run("ask", "--explain"), run("bank", "delete", last=kept[0]["id"])]
        assert kept[0]["id"] not in MemoryBank.open(folder / "bank")
        for output in outputs:
            assert output.exit_code == 0, output.output
            assert not set(output.stdout) & (_CONTROLS - {"\n"})  # the progress bar on stderr has its own


def _check_llama_index(text: str, model: MACModel) -> None:
    engine = MACEngine(model)
    writer = MemoryWriter(engine)
    store = MACVectorStore(SimpleVectorStore(), engine)
    nodes: list[tuple[bool, str, dict[str, Any]]] = [
        (readable(text), "bad", {"id_": "bad", "text": text}),
        (readable(text), "", {"id_": text, "text": "Fog."}),
        (storable(text), "bad", {"id_": "bad", "text": "Fog.", "metadata": {"note": text}}),
    ]
    for accepted, name, fields in nodes:
        try:
            node = IndexDocument(**fields)
        except ValidationError:  # LlamaIndex itself refuses halves of surrogate pairs
            assert not accepted
            continue
        with patch("mac_rag.integrations.llama_index.writer.logger.warning") as warning:
            writer([node])
        if not accepted:
            told = str(warning.call_args.args[1])
            assert name in told
            assert _place(text) in told
            assert not engine.bank.document_ids
        else:
            assert engine.bank.document_ids == [node.id_]
            assert engine.bank[node.id_].metadata == node.metadata
            store.delete(node.id_)
            assert not engine.bank.document_ids
    if len(text) < 60:
        engine.adapt([Document("known", "A storm has hit Wunville.")])
        found = [NodeWithScore(node=TextNode(id_="known", text="A storm has hit Wunville."))]
        postprocessor = MACNodePostprocessor(engine)
        _decided(readable(text), lambda: postprocessor.postprocess_nodes(found, query_str=text), _place(text))
        llm = MACLLM(engine=engine, max_new_tokens=1)
        _decided(readable(text), lambda: llm.complete(text, formatted=True), _place(text))
