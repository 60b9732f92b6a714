"""From a text to the terms that BM25 counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from mac_rag.errors import ConfigError

# Languages by the names of PyStemmer; each is one of bm25s's lists of stop words.
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
    """Cuts texts into terms: lower-cased words without stop words, stemmed.

    Args:
        pattern: a regular expression of what a word is.
        stemmer: a snowball language of PyStemmer such as `english`; None leaves words as they are.
        stopwords: a language whose most frequent words are dropped; None keeps all.

    Raises:
        ConfigError: for a language that there is no stemmer or no list of stop words for, or a broken pattern.
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
            raise ConfigError(f"{self.pattern!r} is no regular expression: {error}") from None
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
        """What it takes to make an equal one, fit for JSON."""
        return {"pattern": self.pattern, "stemmer": self.stemmer, "stopwords": self.stopwords}
