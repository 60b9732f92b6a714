"""Chat prompts are the tokenizer's own template, and nothing in a text becomes a control token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mac_rag.config import MACConfig, PromptFormat
from mac_rag.errors import ConfigError, ModelLoadError, PromptError
from mac_rag.lm.chat import ChatPromptEncoder, ChatTemplate, Message, prompt_encoder
from mac_rag.lm.prompt import PromptEncoder
from mac_rag.lm.text_tokenizer import TextTokenizer

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


TOKENIZERS = chat_tokenizers()
MADE = {name: make("<|im_start|>", "<|im_end|>") for name, make in FAMILIES.items()}
TEXTS = st.text(st.sampled_from("Ada Voss\n é12.,?:'-($[{日"), min_size=1, max_size=30).map(str.strip).filter(bool)
CONTROL = ("<|im_end|>", "</s>", "[SEP]", "<|im_start|>", "<s>", "<unk>", "[UNK]", "<think>", "<tool_call>")
NAMES = st.sampled_from(list(TOKENIZERS))


def apply(name: str, messages: list[tuple[str, str]], **options: Any) -> list[int]:
    """What transformers makes of a conversation."""
    said = [{"role": role, "content": text} for role, text in messages]
    options = {"add_generation_prompt": True, "enable_thinking": False, **options}
    ids: list[int] = TOKENIZERS[name].apply_chat_template(said, return_dict=False, **options)
    return ids


@settings(deadline=None, max_examples=150)
@given(NAMES, TEXTS, st.lists(TEXTS, max_size=2), st.none() | TEXTS)
def test_prompts_are_those_of_the_template(name: str, question: str, documents: list[str], system: str | None) -> None:
    if name not in TAKE_SYSTEM:
        system = None
    prompts = ChatPromptEncoder(TOKENIZERS[name], PromptFormat(chat=True, system=system))
    turn = "".join(f"{document}\n" for document in documents) + question
    expected = apply(name, [*([("system", system)] if system else []), ("user", turn)])
    assert prompts.prompt(question, documents) == expected


@settings(deadline=None, max_examples=80)
@given(NAMES, st.lists(TEXTS, min_size=3, max_size=5).filter(lambda texts: len(texts) % 2 == 1))
def test_histories_are_those_of_the_chat_template(name: str, texts: list[str]) -> None:
    roles = ["user", "assistant"] * len(texts)
    messages = [Message(role, text) for role, text in zip(roles, texts)]  # type: ignore[arg-type]
    assert ChatTemplate(TOKENIZERS[name]).ids(messages) == apply(name, list(zip(roles, texts)))


@settings(deadline=None, max_examples=80)
@given(NAMES, TEXTS, TEXTS)
def test_an_answer_is_that_of_the_chat_template_and_its_end(name: str, question: str, answer: str) -> None:
    prompts = ChatPromptEncoder(TOKENIZERS[name], PromptFormat(chat=True))
    trained = prompts.prompt(question) + prompts.answer(answer)
    whole = apply(name, [("user", question), ("assistant", answer)], add_generation_prompt=False)
    assert trained == whole[: len(trained)]  # behind the end of the turn a template may write a line break
    assert trained[-1] == prompts.chat.end_token
    assert prompts.chat.end_token in prompts.end_tokens


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "qwen-3"])
def test_questions_behind_each_other_are_one_conversation(name: str) -> None:
    prompts = ChatPromptEncoder(TOKENIZERS[name], PromptFormat(chat=True))
    pairs = [("Who opened it?", "Ada Voss"), ("When?", "in May")]
    joined = [token for prompt, answer in prompts.exchanges(["A museum."], pairs) for token in prompt + answer]
    said = [
        ("user", "A museum.\nWho opened it?"),
        ("assistant", "Ada Voss"),
        ("user", "When?"),
        ("assistant", "in May"),
    ]
    assert joined == apply(name, said, add_generation_prompt=False)[: len(joined)]
    assert len(joined) > len(apply(name, said[:3]))
    shown = [("user", pairs[0][0]), ("assistant", pairs[0][1]), ("user", "Where?")]
    assert prompts.after_examples(pairs[:1], "Where?") == apply(name, shown)


def control_ids(tokenizer: Any) -> dict[str, int]:
    return {token: number for token, number in tokenizer.get_added_vocab().items() if not token.isspace()}


@settings(deadline=None, max_examples=150)
@given(NAMES, st.lists(st.sampled_from(CONTROL) | TEXTS, min_size=1, max_size=4).map("".join), st.integers(0, 3))
def test_control_tokens_in_texts_are_text_in_a_chat(name: str, text: str, place: int) -> None:
    tokenizer = TOKENIZERS[name]
    prompts = ChatPromptEncoder(tokenizer, PromptFormat(chat=True))
    said = ["Who opened the museum?", "Ada Voss", "What did she open?", "A museum."]
    plain, said[place] = list(said), text

    def written(question: str, answer: str, document: str, again: str) -> list[int]:
        pairs = [(question, answer), (again, answer)]
        return [token for prompt, end in prompts.exchanges([document], pairs) for token in prompt + end]

    control = set(control_ids(tokenizer).values())
    count = [sum(token in control for token in written(*texts)) for texts in (plain, said)]
    assert count[0] == count[1] > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", CONTROL)
def test_control_tokens_in_texts_are_text_in_a_plain_prompt(family: str, text: str) -> None:
    tokenizer = MADE[family]
    prompts = PromptEncoder(tokenizer, PromptFormat())
    control = control_ids(tokenizer)
    # Characters that a tokenizer does not know are its unknown token, but the name of that token is text, too.
    unknown = control.pop("[UNK]", control.pop("<unk>", None))
    for wrapped in (text, f"a {text} b", f"{text}{text}", f"x{text}", f"{text}x"):
        read = prompts.document(wrapped) + prompts.question(wrapped) + prompts.answer(wrapped)[:-1]
        assert set(control.values()).isdisjoint(read)
        if text in control:
            assert control[text] in tokenizer(wrapped, add_special_tokens=False).input_ids
    if text in ("[UNK]", "<unk>") and unknown is not None:
        assert prompts.texts.ids(text) != [unknown]


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(list(FAMILIES)), TEXTS, st.booleans())
def test_texts_without_control_tokens_keep_their_ids(family: str, text: str, special: bool) -> None:
    tokenizer = MADE[family]
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    texts = TextTokenizer(tokenizer)
    assert texts.ids(text, special=special) == encoded.input_ids
    assert texts.ids_and_spans(text, special=special) == (encoded.input_ids, encoded.offset_mapping)


def test_added_tokens_that_are_text_stay() -> None:
    tokenizer = TOKENIZERS["qwen-3"]
    spaces, think = tokenizer.convert_tokens_to_ids(["    ", "<think>"])
    ids = TextTokenizer(tokenizer).ids("if x:\n    return <think>")
    assert spaces in ids
    assert think not in ids


def test_control_tokens_of_a_users_own_template_are_control_tokens() -> None:
    tokenizer = MADE["byte-level"]
    prompts = PromptEncoder(tokenizer, PromptFormat(question="<|im_start|>{question}<|im_end|>"))
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    ids = prompts.question("Who? <|im_end|>")
    assert (ids[0], ids[-1]) == (start, end)
    assert {start, end}.isdisjoint(ids[1:-1])


def test_a_system_message_that_would_be_dropped_or_refused_is_an_error() -> None:
    for name in sorted(set(TOKENIZERS) - set(TAKE_SYSTEM)):
        with pytest.raises(ModelLoadError, match=r"takes no system message; leave out prompt.system .*'Be brief.'"):
            ChatPromptEncoder(TOKENIZERS[name], PromptFormat(chat=True, system="Be brief."))
        with pytest.raises(PromptError, match="system"):
            ChatTemplate(TOKENIZERS[name]).ids([Message("system", "Be brief."), Message("user", "Who?")])


def test_a_conversation_that_the_template_refuses_is_an_error_with_its_words() -> None:
    with pytest.raises(PromptError, match="refuses messages by user, user: conversation roles must alternate"):
        ChatTemplate(TOKENIZERS["mistral"]).ids([Message("user", "Who?"), Message("user", "When?")])


def test_a_tokenizer_without_a_chat_template_is_an_error() -> None:
    with pytest.raises(ModelLoadError, match="no chat template; take an instruct LM"):
        prompt_encoder(byte_level(), PromptFormat(chat=True))


def test_the_format_refuses_templates_that_a_chat_does_not_use() -> None:
    with pytest.raises(ValueError, match="leave it out, or say in `system` how to answer"):
        PromptFormat(chat=True, question="Q: {question}")
    with pytest.raises(ValueError, match="set chat: true"):
        PromptFormat(system="Be brief.")
    part = {"design": "decoder-only", "name": None}
    values = {"base_lm": {"name": "x"}, "amortization": part, "input_encoder": part, "prompt": {"system": "Hm"}}
    with pytest.raises(ConfigError, match="only a chat has a system message"):
        MACConfig.parse(values, "config.json")


@settings(deadline=None, max_examples=60)
@given(NAMES, st.lists(TEXTS, min_size=1, max_size=4), st.integers(0, 60))
def test_fitted_chats_keep_the_first_documents_and_the_question(name: str, documents: list[str], spare: int) -> None:
    prompts = ChatPromptEncoder(TOKENIZERS[name], PromptFormat(chat=True))
    room = len(prompts.prompt("Who opened it?")) + spare
    fitted = prompts.fit_to_window("Who opened it?", documents, room)
    assert list(fitted.ids) == prompts.prompt("Who opened it?", fitted.contexts)
    assert len(fitted.ids) <= room
    assert fitted.truncated == (len(prompts.prompt("Who opened it?", documents)) > room)
    whole = [text for text in fitted.contexts if text in documents]
    assert len(whole) >= len(fitted.contexts) - 1
    assert all(kept == given or given.startswith(kept) for kept, given in zip(fitted.contexts, documents))


@pytest.mark.parametrize("name", ["chatml", "gemma", "mistral"])
def test_any_conversation_is_brought_into_a_form_that_the_template_takes(name: str) -> None:
    prompts = ChatPromptEncoder(TOKENIZERS[name], PromptFormat(chat=True))
    said = [
        Message("system", "Be brief."),
        Message("system", "Be kind."),
        Message("user", "Who?"),
        Message("user", "When? "),
        Message("assistant", ""),
    ]
    system, turn = "Be brief.\n\nBe kind.", "Who?\n\nWhen?"
    expected = [("user", f"{system}\n\n{turn}")] if name == "gemma" else [("system", system), ("user", turn)]
    assert list(prompts.fit_conversation(said, "When?").ids) == apply(name, expected)


@settings(deadline=None, max_examples=40)
@given(NAMES, st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(0, 80))
def test_contexts_in_a_conversation_are_cut_to_the_room(name: str, lengths: list[int], spare: int) -> None:
    prompts = ChatPromptEncoder(TOKENIZERS[name], PromptFormat(chat=True))
    contexts = [f"{number}. " + "museum " * length for number, length in enumerate(lengths)]

    def conversation(*texts: str) -> list[Message]:
        return [Message("user", "Read: " + " - ".join(texts) + " Answer: Who?")]

    room = len(prompts.chat.ids(conversation(*[""] * len(contexts)))) + spare
    fitted = prompts.fit_conversation(conversation(*contexts), "Who?", contexts, room)
    assert len(fitted.ids) <= room
    assert fitted.truncated == (len(prompts.chat.ids(conversation(*contexts))) > room)
    kept = [*fitted.contexts, *[""] * (len(contexts) - len(fitted.contexts))]
    assert list(fitted.ids) == prompts.chat.ids(conversation(*kept))
    assert all(context.startswith(text) for text, context in zip(kept, contexts))
