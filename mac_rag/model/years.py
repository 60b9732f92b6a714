"""Which tokens of a vocabulary are years."""

from __future__ import annotations

import re
from typing import Any

from mac_rag.config import YearsConfig
from mac_rag.errors import ConfigError
from mac_rag.nn.named_years import NamedYears, Years

_FIRST, _END = 1000, 2100  # years before and from this one on are numbers like any other
_DIGIT = re.compile(r"(?:##)?\d")


def named_years(config: YearsConfig, tokenizer: Any, width: int) -> NamedYears:
    """The vectors of the years that texts name.

    The calendar ends with 2099 and is as long as a vector is wide, but begins in 1000 at the earliest.

    Args:
        config: how much a year counts.
        tokenizer: of questions and documents. Years that it divides into several tokens are left out.
        width: D.

    Raises:
        ConfigError: when no year is a token.
    """
    calendar = range(max(_FIRST, _END - width), _END)
    tokens: dict[int, int] = {}
    unknown = tokenizer.unk_token_id
    for before in ("", " "):
        rows = tokenizer([f"{before}{year}" for year in calendar], add_special_tokens=False)["input_ids"]
        tokens |= {
            row[0]: year for year, row in zip(calendar, rows, strict=True) if len(row) == 1 and row[0] != unknown
        }
    if not tokens:
        raise ConfigError(
            f"hashed_bm25.years needs years that are one token, but the vocabulary has none from {calendar.start} to "
            f"{calendar.stop - 1}; leave it out"
        )
    vocabulary = tokenizer.get_vocab()
    digits = {name: token for name, token in vocabulary.items() if _DIGIT.match(name)}
    # BERT's vocabulary marks what continues a word, others mark what begins one.
    pieces = any(name.startswith("##") for name in vocabulary)
    continuing = [token for name, token in digits.items() if not pieces or name.startswith("##")]
    years = Years(tokens, continuing, len(tokenizer), calendar, config.weight, config.decay)
    return NamedYears(years, width)
