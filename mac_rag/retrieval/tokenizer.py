"""Splits texts into the terms that BM25 counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from mac_rag.errors import ConfigError

# Languages by their names in PyStemmer, and the suffixes of bm25s's lists of stop words.
_STOPWORDS = {
    "chinese": "CHINESE",
    "danish": "DANISH",
    "dutch": "DUTCH",
    "english": "EN",
    "french": "FRENCH",
    "german": "GERMAN",
    "italian": "ITALIAN",
    "korean": "KOREAN",
    "norwegian": "NORWEGIAN",
    "portuguese": "PORTUGUESE",
    "russian": "RUSSIAN",
    "spanish": "SPANISH",
    "swedish": "SWEDISH",
    "turkish": "TURKISH",
}


@dataclass(frozen=True)
class Tokenizer:
    """Splits texts into terms: lower-cased words without stop words, stemmed.

    Args:
        pattern: regular expression that matches a word.
        stemmer: Snowball language of PyStemmer, such as `english`; None for no stemming.
        stopwords: language whose stop words are dropped; None to keep all words.

    Raises:
        ConfigError: for a language without a stemmer or a list of stop words, or an invalid pattern.

    Examples:
        >>> from mac_rag.retrieval import Tokenizer
        >>> Tokenizer()("The bridges were opened in May")
        ['bridg', 'were', 'open', 'may']
    """

    pattern: str = r"\w+"
    stemmer: str | None = "english"
    stopwords: str | None = "english"
    _find: Callable[[str], list[str]] = field(init=False, repr=False, compare=False)
    _dropped: frozenset[str] = field(init=False, repr=False, compare=False, default=frozenset())
    _stem: Callable[[list[str]], list[str]] | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        try:
            compiled = re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(f"{self.pattern!r} is not a regular expression: {error}") from None
        if compiled.groups:
            raise ConfigError(f"the pattern {self.pattern!r} has groups; write them as (?:...)")
        object.__setattr__(self, "_find", compiled.findall)
        if self.stemmer is not None:
            import Stemmer

            if self.stemmer not in Stemmer.algorithms():
                known = ", ".join(Stemmer.algorithms())
                raise ConfigError(f"unknown stemmer {self.stemmer!r}; choose None or one of {known}")
            object.__setattr__(self, "_stem", Stemmer.Stemmer(self.stemmer).stemWords)
        if self.stopwords is not None:
            if self.stopwords not in _STOPWORDS:
                raise ConfigError(
                    f"no stop words for {self.stopwords!r}; choose None or one of {', '.join(_STOPWORDS)}"
                )
            from bm25s import stopwords

            object.__setattr__(
                self, "_dropped", frozenset(getattr(stopwords, f"STOPWORDS_{_STOPWORDS[self.stopwords]}"))
            )

    def __call__(self, text: str) -> list[str]:
        words = [word for word in self._find(text.lower()) if word not in self._dropped]
        return self._stem(words) if self._stem else words

    def describe(self) -> dict[str, str | None]:
        """The arguments that make an equal tokenizer, as JSON."""
        return {"pattern": self.pattern, "stemmer": self.stemmer, "stopwords": self.stopwords}
