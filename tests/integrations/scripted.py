"""An instruct LM that follows a script: what it reads is recorded, and what it says is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mac_rag.engine import MACEngine
from mac_rag.model import MACModel


class Script:
    """Replaces the logits of a model's LM, so that it says a known reply, token by token, and ends its turn.

    Everything around them is real: chat template, tokenizer, prefix, decoding.

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
