"""Sampling, stop strings, and the tokens that end an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from mac_rag.config import BaseLMConfig, PromptFormat
from mac_rag.errors import ConfigError, ModelLoadError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.decoding import Sampling, TokenChoice
from mac_rag.lm.loading import load_causal_lm
from mac_rag.model import MACModel
from tests.helpers import mac_config

CPU = torch.device("cpu")
QUESTIONS = ["Who opened the museum?", "When?", "What did Ada Voss open in Orsena in the month of May?"]
WARM = Sampling(temperature=1.5, top_p=0.95, seed=3)


@pytest.fixture(scope="module")
def lm(model_folder: Callable[[str], Path]) -> BaseLM:
    loaded = BaseLM.load(BaseLMConfig(name=str(model_folder("llama"))), PromptFormat(), CPU)
    with torch.no_grad():
        for parameter in loaded.model.parameters():  # far from uniform, so that what is drawn depends on the prompt
            parameter.mul_(6)
    return loaded


def test_a_seeded_answer_does_not_depend_on_its_batch(lm: BaseLM) -> None:
    prompts = [lm.prompts.prompt(question) for question in QUESTIONS]
    together = lm.generate(prompts, None, max_new_tokens=12, sampling=WARM)
    assert together == [lm.generate([p], None, max_new_tokens=12, sampling=WARM)[0] for p in prompts]
    assert together == lm.generate(prompts[::-1], None, max_new_tokens=12, sampling=WARM)[::-1]
    assert together == ["".join(lm.stream(p, None, max_new_tokens=12, sampling=WARM)) for p in prompts]
    others = {
        lm.generate(prompts[:1], None, max_new_tokens=12, sampling=Sampling(1.5, 0.95, seed))[0] for seed in range(6)
    }
    assert len(others) > 1


def test_an_answer_without_a_seed_follows_torchs_generator(lm: BaseLM) -> None:
    prompts = [lm.prompts.prompt(QUESTIONS[0])] * 3

    def answers() -> list[str]:
        return lm.generate(prompts, None, max_new_tokens=12, sampling=Sampling(temperature=2.0))

    torch.manual_seed(1)
    first, second = answers(), answers()
    torch.manual_seed(1)
    assert answers() == first != second
    assert len(set(first)) > 1  # equal prompts in one batch are drawn apart


def test_sampling_with_memory_weight_streams_what_it_generates(tiny_model: MACModel) -> None:
    phi = tiny_model.amortize(["Ada Voss opened the museum."])
    context = ["The museum is in Orsena."]
    answer = tiny_model.generate(QUESTIONS[:1], [context], modulation=phi, memory_weight=0.5, sampling=WARM)
    pieces = tiny_model.stream(QUESTIONS[0], context, modulation=phi, memory_weight=0.5, sampling=WARM)
    assert "".join(pieces) == answer[0]


@settings(deadline=None, max_examples=30)
@given(
    logits=st.lists(st.floats(-3, 3), min_size=2, max_size=6),
    temperature=st.floats(0.3, 3),
    top_p=st.floats(0.05, 1),
)
def test_tokens_are_drawn_from_the_nucleus_by_their_probabilities(
    logits: list[float], temperature: float, top_p: float
) -> None:
    draws = 2000
    sampling = Sampling(temperature, top_p)
    torch.manual_seed(0)
    drawn = TokenChoice(sampling, draws)(torch.tensor(logits).expand(draws, -1))
    weights = (torch.tensor(logits).double() / temperature).softmax(0).tolist()
    nucleus: dict[int, float] = {}
    for token in sorted(range(len(weights)), key=lambda i: -weights[i]):
        if sum(nucleus.values()) < top_p - 1e-6:
            nucleus[token] = weights[token]
    counts = Counter(drawn.tolist())
    close = [abs(sum(sorted(weights, reverse=True)[:count]) - top_p) < 1e-6 for count in range(1, len(weights) + 1)]
    assert counts.keys() <= nucleus.keys() or any(close)
    for token, weight in nucleus.items():
        share = weight / sum(nucleus.values())
        assert abs(counts[token] / draws - share) < 5 * (share * (1 - share) / draws) ** 0.5 + 1e-3


def test_a_stop_string_ends_an_answer_and_is_no_part_of_it(lm: BaseLM) -> None:
    prompts = [lm.prompts.prompt(question) for question in QUESTIONS]
    whole = lm.generate(prompts, None, max_new_tokens=24)
    for place, length in ((3, 1), (5, 3), (len(whole[0]) - 2, 2)):
        stop = whole[0][place : place + length]
        sampling = Sampling(stop=("never said", stop))
        expected = [answer.split(stop)[0].strip() for answer in whole]
        assert lm.generate(prompts, None, max_new_tokens=24, sampling=sampling) == expected
        streamed = ["".join(lm.stream(p, None, max_new_tokens=24, sampling=sampling)) for p in prompts]
        assert streamed == expected


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_is_settled_is_never_taken_back(text: str, stop: list[str]) -> None:
    sampling = Sampling(stop=tuple(stop))
    final, stopped = sampling.until_stop(text)
    assert stopped == any(string in text for string in stop)
    assert not any(string in final for string in stop)
    for length in range(len(text) + 1):
        begun = text[:length]
        if any(string in begun for string in stop):
            break
        assert final.startswith(sampling.settled(begun))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; give a number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0; give a number above 0"),
        ({"stop": "end"}, "stop is 'end'; give a tuple of strings"),
        ({"stop": ("",)}, "strings that are not empty"),
    ],
)
def test_settings_out_of_range_are_errors(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**values)  # type: ignore[arg-type]


def test_beams_refuse_sampling(lm: BaseLM) -> None:
    with pytest.raises(ConfigError, match=r"num_beams is 2, .* set num_beams to 1"):
        lm.generate([lm.prompts.prompt("Who?")], None, max_new_tokens=2, num_beams=2, sampling=WARM)


def test_every_end_token_of_the_generation_config_ends_an_answer(tiny_model: MACModel) -> None:
    lm = tiny_model.base_lm
    prompt = lm.prompts.prompt(QUESTIONS[0])
    modulation = tiny_model.modulation(tiny_model.amortize(["Ada Voss opened it."]))
    steps = lm._decode([prompt], modulation, None, WARM)
    tokens = [int(next(steps)[0]) for _ in range(8)]
    place = next(i for i in range(2, 8) if tokens[i] not in tokens[:i])
    expected = lm.tokenizer.decode(tokens[:place], skip_special_tokens=True).strip()
    lm.model.generation_config.eos_token_id = [lm.tokenizer.eos_token_id, tokens[place]]
    ending = BaseLM(lm.model, lm.tokenizer, lm.prompts.format)
    assert ending.end_tokens == sorted({lm.tokenizer.eos_token_id, tokens[place]})
    assert ending.generate([prompt], modulation, max_new_tokens=8, sampling=WARM) == [expected]
    assert "".join(ending.stream(prompt, modulation, max_new_tokens=8, sampling=WARM)) == expected

    lm.model.generation_config.eos_token_id = list(range(len(lm.tokenizer) - 1))  # beams need one that does not end
    silent = BaseLM(lm.model, lm.tokenizer, lm.prompts.format)
    assert lm.generate_each([prompt], modulation, max_new_tokens=8, weights=[1.0]) != [[""]]
    assert silent.generate_each([prompt], modulation, max_new_tokens=8, weights=[1.0]) == [[""]]
    assert silent.generate([prompt], modulation, max_new_tokens=8, num_beams=2) == [""]


def test_a_tokenizer_without_padding_is_padded_by_its_end_token(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_pretrained(model_folder("llama")).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model_folder("llama"))
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token_id is None
    lm = BaseLM.load(BaseLMConfig(name=str(tmp_path)), PromptFormat(), CPU)
    prompts = [lm.prompts.prompt(question) for question in QUESTIONS]
    assert lm.generate(prompts, None, max_new_tokens=4) == [
        lm.generate([p], None, max_new_tokens=4)[0] for p in prompts
    ]


def test_a_vocabulary_beyond_the_embeddings_is_an_error_at_load(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    for folder in ("lm", "encoder"):
        AutoModelForCausalLM.from_pretrained(model_folder("llama")).save_pretrained(tmp_path / folder)
        tokenizer = AutoTokenizer.from_pretrained(model_folder("llama"))
        tokenizer.add_tokens([AddedToken("<|im_end|>", special=True)])
        tokenizer.save_pretrained(tmp_path / folder)
    message = "token ids up to 400, but the model has embeddings for 400 tokens"
    with pytest.raises(ModelLoadError, match=message):
        load_causal_lm(BaseLMConfig(name=str(tmp_path / "lm")), CPU)
    with pytest.raises(ModelLoadError, match=message):
        MACModel.from_config(mac_config(model_folder("llama"), tmp_path / "encoder"), device="cpu")


def test_a_tokenizer_without_an_end_token_is_an_error(model_folder: Callable[[str], Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder("llama"))
    tokenizer.eos_token = None
    with pytest.raises(ModelLoadError, match="no eos_token, so answers could not end"):
        BaseLM(AutoModelForCausalLM.from_pretrained(model_folder("llama")), tokenizer, PromptFormat())
