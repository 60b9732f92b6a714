"""Which language a text is in, and the one warning of texts that a model does not read."""

from __future__ import annotations

import logging
import random
import string
import sys

import pytest

from mac_rag.data import languages
from mac_rag.data.languages import language_of
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel

GERMAN = "Die Firma beschäftigt 180 Menschen in Rotterdam und wurde 1934 von Helene Park gegründet."
FOREIGN = {
    "de": GERMAN,
    "fr": "La société emploie 180 personnes à Rotterdam et fut fondée en 1934 par Hélène Park.",
    "es": "La empresa tiene 180 empleados en Róterdam y fue fundada en 1934 por Elena Parque, su primera directora.",
    "ru": "Компания основана в 1934 году и насчитывает 180 сотрудников в Роттердаме.",
    "ja": "この会社は1934年に設立され、ロッテルダムで180人の従業員を雇用している。",
    "el": "Η εταιρεία ιδρύθηκε το 1934 και απασχολεί 180 άτομα στο Ρότερνταμ.",
}


@pytest.mark.parametrize("language", FOREIGN)
def test_a_sentence_tells_its_language(language: str) -> None:
    assert language_of(FOREIGN[language]) == language


def test_english_news_are_english() -> None:
    found = {language_of(document.text) for document in generate("train", 60).documents}
    assert "en" in found
    assert found <= {"en", None}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Guten Tag!",
        "Bonjour tout le",
        "José García López",
        "Edgar Flara, Rainga Press, Ines Kaur, Lena Marsh, Ada Voss, Thomas Webb, Björn Åkesson, Łukasz Wójcik",
        "1934 180 25.5 2004-05-03 " * 30,
        "| 4 | 8 | 15 |\n" * 40,
        "def f(x):\n    return [y + 1 for y in x if y]\n\nfor i in range(10):\n    print(f([i]))\n",
        "https://a.example/x?y=1&z=2 " * 10,
        "\x00\x1b[2J\ud800" * 50,
    ],
)
def test_what_tells_no_language_is_none(text: str) -> None:
    assert language_of(text) in (None, "en")


def test_noise_is_no_language() -> None:
    rng = random.Random(0)
    for _ in range(20):
        words = ("".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(40))
        assert language_of(" ".join(words)) in (None, "en")


def test_the_first_foreign_document_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = MACModel.from_pretrained("mac-tiny")
    model.config = model.config.model_copy(update={"languages": ("en",)})
    english = [Document("name\x1b", "José García López"), *generate("train", 3).documents]
    with caplog.at_level(logging.WARNING):
        engine = MACEngine(model)
        engine.adapt(english)
        assert not caplog.records
        engine.adapt([Document("firma\x1b", GERMAN), Document("société", FOREIGN["fr"])])
        engine.adapt([Document("empresa", FOREIGN["es"])])
    [record] = caplog.records
    assert "(de)" in record.getMessage()
    assert "mac-tiny does not read (it reads en)" in record.getMessage()
    assert "firma" in record.getMessage()
    assert "\x1b" not in record.getMessage()
    assert len(engine.bank) == len(english) + 3


def test_without_the_identifier_a_language_is_an_error_and_adapting_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    languages._identifier.cache_clear()
    for name in ("py3langid", "py3langid.langid"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'mac-rag\[languages\]'"):
        language_of(GERMAN)
    model = MACModel.from_pretrained("mac-tiny")
    model.config = model.config.model_copy(update={"languages": ("en",)})
    assert MACEngine(model).adapt([Document("firma", GERMAN)]).added == 1
    assert not caplog.records


def test_models_that_say_no_language_do_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mac_rag.adapting.language_of")
    assert MACEngine("mac-tiny").adapt([Document("firma", GERMAN)]).added == 1
