"""Identifies the language of a text, to warn of texts that a model does not read."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from mac_rag.errors import ConfigError

_LETTERS = 20  # with fewer letters, a language is identified only by chance
# Of 2,067 English paragraphs of Wikipedia, none is taken for another language with a probability above 0.48.
_SURE = 0.9
_NONE = frozenset(("mis", "mul", "und", "zxx"))  # ISO 639's codes for texts in no single known language
_READ = 2_000  # characters at the beginning that are enough


def language_of(text: str) -> str | None:
    """The language of a text, as an ISO 639 code such as `en`. Needs the extra `languages`.

    None if the beginning of the text does not tell the language with certainty, for example of a short text, a list of
    names, numbers or code. The identifier (py3langid) needs no network; the first call loads it, which takes half a
    second and 100 MB of memory.

    Examples:
        >>> language_of("Die Firma beschäftigt 180 Menschen in Rotterdam und wurde 1934 gegründet.")
        'de'
        >>> language_of("Edgar Flara, Rainga Press, Ines Kaur, Lena Marsh")

    Raises:
        ConfigError: if py3langid is missing.
    """
    beginning = text[:_READ]
    if sum(map(str.isalpha, beginning)) < max(_LETTERS, len(beginning) // 3):
        return None
    language, probability = _identifier().classify(beginning)
    return str(language) if probability >= _SURE and language not in _NONE else None


@lru_cache(1)
def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise ConfigError(
            "identifying the language of a text needs py3langid: pip install 'mac-rag[languages]'"
        ) from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
