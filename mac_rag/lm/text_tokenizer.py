"""Tokenizes texts so that no part of them becomes a control token, such as `<|im_end|>`, `</s>` or `[SEP]`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Encoding, Tokenizer

from mac_rag.data.characters import check_characters
from mac_rag.errors import ModelLoadError

Span = tuple[int, int]  # index of the first character, and of the character after the last


class TextTokenizer:
    """A tokenizer for untrusted texts, which come from users or documents.

    It is a copy of an LM's tokenizer in which every control token has another, secret name. So `<|im_end|>` in a text
    is text like any other. All other texts get the same ids as from the LM's tokenizer. Templates are trusted: `mark`
    keeps their control tokens.

    Examples:
        >>> from mac_rag import MACModel
        >>> tokenizer = MACModel.from_pretrained("mac-tiny").base_lm.tokenizer
        >>> tokenizer.eos_token, tokenizer.eos_token_id
        ('</s>', 2)
        >>> texts = TextTokenizer(tokenizer)
        >>> 2 in texts.ids("The end </s>"), texts.ids(texts.mark("</s>"))
        (False, [2])

    Args:
        tokenizer: the tokenizer of a transformers model.

    Attributes:
        control: name of each control token -> its id: the special tokens, and other added tokens that the chat template
            writes. Added tokens that are text, such as runs of spaces, are not control tokens.

    Raises:
        ModelLoadError: for a tokenizer without a fast version.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise ModelLoadError(
                f"the tokenizer of {tokenizer.name_or_path!r} ({type(tokenizer).__name__}) has no fast version "
                "(tokenizer.json), which is needed to tell special tokens in texts from control tokens; give an LM "
                "that has one"
            )
        self.control = _control_tokens(tokenizer)
        nonce = token_hex(8)
        self._marks = {name: f"<{nonce}-{token}>" for name, token in self.control.items()}
        self._control_in = _any_of(self._marks)
        self._tokenizer = _renamed(tokenizer.backend_tokenizer, self._marks)
        self._mark_ids = {mark: self.control[name] for name, mark in self._marks.items()}
        self._mark_in = _any_of(self._mark_ids)
        wrong = [name for name, mark in self._marks.items() if self._tokenizer.token_to_id(mark) != self.control[name]]
        if wrong:
            raise ModelLoadError(
                f"the tokenizer of {tokenizer.name_or_path!r} gives {', '.join(wrong)} other ids than its file says; "
                "save it again with transformers"
            )

    def ids(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: the text, or a marked template with texts in it.
            special: True adds the tokens that the tokenizer puts around a text.

        Raises:
            DocumentError: for a text with half of a surrogate pair or NUL.
        """
        check_characters(text)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def batch(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """As `ids`, for many texts at once, on all cores."""
        return [encoding.ids for encoding in self._encodings(texts, special)]

    def ids_and_spans(self, text: str, *, special: bool = False) -> tuple[list[int], list[Span]]:
        """As `ids`, with the characters of the text that each token covers."""
        return self.batch_with_spans([text], special=special)[0]

    def batch_with_spans(self, texts: Sequence[str], *, special: bool = False) -> list[tuple[list[int], list[Span]]]:
        """As `ids_and_spans`, for many texts at once, on all cores."""
        return [(encoding.ids, encoding.offsets) for encoding in self._encodings(texts, special)]

    def _encodings(self, texts: Sequence[str], special: bool) -> list[Encoding]:
        for text in texts:
            check_characters(text)
        return self._tokenizer.encode_batch(list(texts), add_special_tokens=special)

    def ids_after(self, beginning: str, text: str) -> list[int]:
        """Ids of `text` when it follows `beginning`, which may change its first token."""
        before, both = self.ids(beginning), self.ids(beginning + text)
        return both[len(before) :] if both[: len(before)] == before else self.ids(text)

    def mark(self, template: str) -> str:
        """A template whose control tokens stay control tokens when `ids` reads it."""
        return self._control_in.sub(lambda match: self._marks[match[0]], template)

    def first_control(self, marked: str) -> tuple[int, int] | None:
        """The first control token in a marked template: its id and the index after it; None if there is none."""
        match = self._mark_in.search(marked)
        return None if match is None else (self._mark_ids[match[0]], match.end())


_KNOWN: WeakKeyDictionary[Any, TextTokenizer] = WeakKeyDictionary()


def text_tokenizer(tokenizer: Any) -> TextTokenizer:
    """The `TextTokenizer` of a tokenizer, made once and reused: copying a large vocabulary takes a second."""
    if tokenizer not in _KNOWN:
        _KNOWN[tokenizer] = TextTokenizer(tokenizer)
    return _KNOWN[tokenizer]


def _control_tokens(tokenizer: Any) -> dict[str, int]:
    templates = tokenizer.chat_template or ""  # a text, or several by their names
    written = templates if isinstance(templates, str) else "\n".join(templates.values())
    named = getattr(tokenizer, "chat_control_tokens", None) or ()  # the tokenizer itself may say so
    return {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special or token.content in named or (token.content in written and not _is_word(token.content))
    }


def _is_word(content: str) -> bool:
    """True for added tokens that are text even if a template writes them: spaces, line breaks, words like `user`."""
    return content.isspace() or content.isalnum()


def _any_of(names: Mapping[str, Any]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _renamed(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """A copy of a tokenizer in which some tokens have new names and their old ids.

    The model's own vocabulary is renamed, too: it often holds control tokens, and a unigram model would find them in
    texts.
    """
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = description["model"]
    if isinstance(model["vocab"], dict):
        known = names.keys() & model["vocab"].keys()
        model["vocab"] = {names.get(token, token): number for token, number in model["vocab"].items()}
    else:
        known = names.keys() & {token for token, _ in model["vocab"]}
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if known and "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _touches(pair, known)]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    copy = Tokenizer.from_str(json.dumps(description))
    copy.no_truncation()
    copy.no_padding()
    return copy


def _touches(merge: Any, names: Any) -> bool:
    """True if a merge of a byte-pair encoding reads or makes one of the tokens."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names
