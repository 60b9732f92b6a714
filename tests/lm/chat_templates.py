"""Small tokenizers of the families that LMs use, and small versions of well-known chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_TEXTS = [
    "Ada Voss opened the museum in Orsena in May 2024. It has 12 halls, and it cost $34 million.\n",
    "Who opened the museum? The user asked the assistant: answer in a few words, please.\n\nsystem model",
] * 20


def byte_level(*control: str, added: Sequence[str] = ()) -> Any:
    """Byte-level BPE, as of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["</s>", *control]
    tokenizer.train_from_iterator(
        _TEXTS,
        trainers.BpeTrainer(
            vocab_size=360,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return _fast(tokenizer, added)


def sentence_piece_bpe(*control: str, added: Sequence[str] = ()) -> Any:
    """BPE over characters with a space in front of the text's first word, as of Llama 2, Mistral and Zephyr."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "</s>", *control]
    single_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=[*special, *single_bytes], show_progress=False)
    tokenizer.train_from_iterator([text.replace("\n", " ") for text in _TEXTS], trainer)
    fast = _fast(tokenizer, added)
    return _without_special(fast, single_bytes)


def unigram(*control: str, added: Sequence[str] = ()) -> Any:
    """A unigram model, as of T5, whose vocabulary holds the control tokens themselves."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>", *control], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return _fast(tokenizer, added)


def word_piece(*control: str, added: Sequence[str] = ()) -> Any:
    """WordPiece in lower case, as of BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]", "</s>", *control]
    tokenizer.train_from_iterator(
        [*_TEXTS, "[]<>/|_"],
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return _fast(tokenizer, added)


FAMILIES = {
    "byte-level": byte_level,
    "sentence-piece": sentence_piece_bpe,
    "unigram": unigram,
    "word-piece": word_piece,
}


def _fast(tokenizer: Tokenizer, added: Sequence[str]) -> Any:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")
    fast.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return fast


def _without_special(fast: Any, tokens: Sequence[str]) -> Any:
    """The trainer makes all its first tokens special; single bytes are none."""
    import json

    description = json.loads(fast.backend_tokenizer.to_str())
    description["added_tokens"] = [token for token in description["added_tokens"] if token["content"] not in tokens]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(description)), eos_token="</s>", pad_token="</s>"
    )


CHATML = """
{%- if messages[0]['role'] != 'system' -%}
{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

LLAMA_3 = """
{%- if strftime_now is defined %}{% set today = strftime_now('%d %b %Y') %}{% else %}{% set today = '1' %}{% endif -%}
{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + today + '\n\n' -}}
{%- if messages[0]['role'] == 'system' -%}
{{- messages[0]['content'] | trim -}}{%- set messages = messages[1:] -%}
{%- endif -%}
{{- '<|eot_id|>' -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}
"""

MISTRAL = """
{%- if messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] + '\n\n' -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- endif -%}
{{- '<s>' -}}
{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('conversation roles must alternate user/assistant') -}}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{- '[INST] ' + (system if loop.last else '') + message['content'] + ' [/INST]' -}}
{%- else -%}{{- ' ' + message['content'] + '</s>' -}}{%- endif -%}
{%- endfor -%}
"""

GEMMA = """
{{- '<bos>' -}}
{%- if messages[0]['role'] == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
{%- for message in messages -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
"""

ZEPHYR = """
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' -}}
{%- if loop.last and add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}
{%- endfor -%}
"""

PHI_3 = """
{%- for message in messages -%}
{%- if message['role'] != 'system' -%}
{{- '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}
"""  # like the first versions of Phi-3, it leaves out system messages without a word

QWEN_3 = """
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\n' -}}
{%- if message['role'] == 'assistant' and loop.last -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{{- message['content'] + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if tools -%}{{- '<tool_call>' -}}{%- endif -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""


def _with(tokenizer: Any, template: str) -> Any:
    tokenizer.chat_template = template
    return tokenizer


def chat_tokenizers() -> dict[str, Any]:
    """A tokenizer with its chat template for each template."""
    headers = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    phi = _with(sentence_piece_bpe("<|end|>"), PHI_3)
    phi.add_tokens([AddedToken(f"<|{role}|>", rstrip=True, special=True) for role in ("user", "assistant")])
    thinking = ("<think>", "</think>", "<tool_call>", "  ", "    ")
    return {
        "chatml": _with(byte_level("<|im_start|>", "<|im_end|>"), CHATML),
        "llama-3": _with(byte_level(*headers), LLAMA_3),
        "mistral": _with(sentence_piece_bpe("<s>"), MISTRAL),
        "gemma": _with(sentence_piece_bpe("<bos>", "<start_of_turn>", "<end_of_turn>"), GEMMA),
        "zephyr": _with(sentence_piece_bpe("<s>"), ZEPHYR),
        "phi-3": phi,
        "qwen-3": _with(byte_level("<|im_start|>", "<|im_end|>", added=thinking), QWEN_3),
    }


TAKE_SYSTEM = ("chatml", "llama-3", "mistral", "zephyr", "qwen-3")
