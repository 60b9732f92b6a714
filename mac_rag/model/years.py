"""Which tokens of a vocabulary are years."""

from __future__ import annotations

import re
from typing import Any

from mac_rag.config import YearsConfig
from mac_rag.nn.question_words import Years

_YEARS = range(1000, 2100)
_DIGIT = re.compile(r"(?:##)?\d")


def years_of(config: YearsConfig | None, tokenizer: Any) -> Years | None:
    """The years that questions ask for beside those that they name; None without a configuration.

    Args:
        config: how much they ask for these.
        tokenizer: the tokenizer of questions. Years that it divides into several tokens are left out.
    """
    if config is None:
        return None
    rows = tokenizer([f" {year}" for year in _YEARS], add_special_tokens=False)["input_ids"]
    tokens = {year: row[0] for year, row in zip(_YEARS, rows, strict=True) if len(row) == 1}
    vocabulary = tokenizer.get_vocab()
    digits = {name: token for name, token in vocabulary.items() if _DIGIT.match(name)}
    # BERT's vocabulary marks what continues a word, others mark what begins one.
    pieces = any(name.startswith("##") for name in vocabulary)
    continuing = [token for name, token in digits.items() if not pieces or name.startswith("##")]
    return Years(tokens, continuing, len(tokenizer), config.weight, config.decay)
