"""Tiny models of the architectures that mac_rag works with, in folders for the real loaders; pages."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from mac_rag.config import AggregationConfig, BaseLMConfig, EncoderConfig, MACConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.lm.prefix_lm import PrefixLM, PrefixLMConfig
from mac_rag.model import MACModel, OwnKVModel

# Folder of a tiny saved model, by its name: the fixture `model_folder`.
Folder = Callable[[str], Path]
# JSON that is beyond the bounds of `mac_rag.untrusted_files`.
DEEP = "[" * 10_000 + "]" * 10_000
DIGITS = "9" * 5_000
VOCABULARY = 400
# What answering --help, or importing the package, must not import.
HEAVY = (
    "torch", "transformers", "llama_index", "langchain_core", "accelerate", "peft", "bitsandbytes",
    "sentence_transformers", "chromadb", "ray",
)  # fmt: skip
# Widths are multiples of 64, the block that bitsandbytes quantises.
_SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


CHATML = """
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def save_tokenizer(folder: Path, template: str, chat_template: str | None = None) -> None:
    """A byte-level BPE learned from newswire; `template` says what stands around a text, as `$A </s>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", *(() if chat_template is None else ("<|im_start|>", "<|im_end|>"))]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in generate("train", 200).documents), trainer)
    if template != "$A":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


def save_llama(folder: Path) -> Path:
    """A Llama with grouped-query attention."""
    torch.manual_seed(1)
    config = LlamaConfig(
        **_SMALL, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    return _save(LlamaForCausalLM(config), folder, "<s> $A")


def save_instruct(folder: Path) -> Path:
    """A Llama whose tokenizer has a ChatML template."""
    torch.manual_seed(1)
    config = LlamaConfig(
        **_SMALL, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=4096,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, "<s> $A", CHATML)
    return folder


def save_gpt2(folder: Path) -> Path:
    torch.manual_seed(2)
    config = GPT2Config(**_SMALL, n_embd=64, n_layer=2, n_head=4, n_positions=1024)
    return _save(GPT2LMHeadModel(config), folder, "$A")


def save_prefix_lm(folder: Path) -> Path:
    torch.manual_seed(7)
    config = PrefixLMConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, is_decoder=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.3,
    )  # fmt: skip
    return _save(PrefixLM(config), folder, "<s> $A")


def save_t5(folder: Path) -> Path:
    torch.manual_seed(3)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0, eos_token_id=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return _save(T5ForConditionalGeneration(config), folder, "$A </s>")


def save_bert(folder: Path) -> Path:
    torch.manual_seed(4)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=3,
        max_position_embeddings=160, pad_token_id=0,
    )  # fmt: skip
    return _save(BertModel(config), folder, "<s> $A </s>")


def _save(model: Any, folder: Path, template: str) -> Path:
    model.save_pretrained(folder)
    save_tokenizer(folder, template)
    return folder


def built(config: MACConfig, seed: int = 0) -> MACModel:
    """The model of a configuration, with the same random weights each time."""
    torch.manual_seed(seed)
    return MACModel.from_config(config, device="cpu")


def own_kv(folder: Path, documents: Any = None, **options: Any) -> OwnKVModel:
    """A model that remembers by the own keys and values of an LM, by default as they are, in fp32, found by BM25."""
    lm = BaseLMConfig(name=str(folder), dtype="fp32")
    options = {"compression": None, "sentence_encoder": None, **options}
    made = MACModel.around(lm, documents, device="cpu", **options)
    assert isinstance(made, OwnKVModel)
    return made


def reloaded(model: MACModel, folder: Path, **options: Any) -> MACModel:
    """What comes back of a model from its checkpoint in a folder."""
    model.save_pretrained(folder, **options)
    return MACModel.from_pretrained(folder, device="cpu")


def strong(model: MACModel) -> MACModel:
    """The model with a modulation that changes what is generated."""
    torch.manual_seed(3)
    for parameter in model.modulation.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def mac_config(lm: Path, encoder: Path | None = None, design: Any = "decoder-only", **values: Any) -> MACConfig:
    """A small MAC around the LM in `lm`; without `encoder` its encoders start from the LM itself."""
    part = EncoderConfig(design=design, name=None if encoder is None else str(encoder))
    defaults = {
        "tokens": 4,
        "max_new_tokens": 6,
        "aggregation": AggregationConfig(blocks=2, heads=2, head_width=8, prior_width=16),
    }
    return MACConfig(
        base_lm=BaseLMConfig(name=str(lm)), amortization=part, input_encoder=part, **{**defaults, **values}
    )


class Elements(HTMLParser):
    """The elements of a page.

    Attributes:
        found: tag and attributes of each, in order.
        around: of each, the tags that are open around it.
        text: the text between them, as a reader sees it.
        comments: texts of comments.
        misplaced: tags that are not closed in the order in which they were opened.
    """

    _VOID = {"meta", "br", "hr", "img", "input", "link", "source"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.around: list[tuple[str, ...]] = []
        self.text = ""
        self.comments: list[str] = []
        self.misplaced: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.misplaced += self._open

    def values(self, *names: str) -> list[str]:
        """The values of attributes of these names, in the order of the page."""
        return [value for _, attributes in self.found for name, value in attributes.items() if name in names]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))
        self.around.append(tuple(self._open))
        if tag not in self._VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self._VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if self._open[-1:] != [tag]:
            self.misplaced.append(tag)
        while tag in self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


def copy_of(model: MACModel) -> MACModel:
    """A copy that shares the tokenizers."""
    values = (value for part in model.modules() for value in vars(part).values())
    return copy.deepcopy(model, {id(value): value for value in values if isinstance(value, PreTrainedTokenizerBase)})


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)
