"""Every architecture, in every dtype and quantised, with its own keys and values as its memory.

What an LM computes for documents after an opening, handed back as `BlockPrefix`, gives the logits and answers of the
plain text: opening, document, question, without a cache, padding or masks of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from mac_rag.config import BaseLMConfig
from mac_rag.errors import ModelLoadError, QuantizationError
from mac_rag.lm.attention_sink import key_rotation
from mac_rag.lm.base_lm import BaseLM
from mac_rag.model import MACModel
from mac_rag.nn.block_prefix import BlockPrefix
from tests.helpers import VOCABULARY
from tests.lm.conftest import InTable
from tests.lm.helpers import (
    ALIKE,
    ARCHITECTURES,
    DTYPES,
    HYBRIDS,
    LEARNED_POSITIONS,
    NEW,
    QUANTIZED_TOLERANCES,
    ROTATIONS,
    SCALINGS,
    TOLERANCES,
    UNSUPPORTED,
    WINDOW,
    WITHOUT_PREFIX,
    Numbers,
    joining,
    lm_of_numbers,
    masks_by_hand,
    quantized_lm,
    random_lm,
)

KIND = "own-kv"
NAMES = [*ARCHITECTURES, *ROTATIONS]
# Largest root mean square differences of logits, in standard deviations of these. In half precision they come on top of
# twice the error that the plain text has against the same weights in fp32.
FLOORS = {"fp32": 1e-4, "bf16": torch.finfo(torch.bfloat16).eps, "fp16": torch.finfo(torch.float16).eps}
LEAST_EFFECT = 0.2  # what a document changes in the logits, so that a memory that is lost is noticed


def _tokens(*lengths: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, VOCABULARY, (length,), generator=random).tolist() for length in lengths]


OPENING = [1, *_tokens(3)[0]]
DOCUMENTS = _tokens(2 * WINDOW + 5, WINDOW - 3)  # longer and shorter than a window
QUESTIONS = _tokens(3, 6)
ANSWERS = _tokens(4, 2)
TEXTS = [[*OPENING, *document, *question] for document, question in zip(DOCUMENTS, QUESTIONS, strict=True)]
BIAS = [-0.7, -1.5]


def distance(found: Tensor, expected: Tensor) -> float:
    """Root mean square difference of logits, in standard deviations of those expected."""
    return float((found.float() - expected.float()).square().mean().sqrt() / expected.float().std())


@torch.no_grad()
def text_logits(model: Any, text: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Logits that predict each token of an answer to a text, by the plain model: `[tokens, vocabulary]`."""
    logits: Tensor = model(input_ids=torch.tensor([[*text, *answer]])).logits[0, len(text) - 1 : -1]
    return logits


@torch.no_grad()
def parallel_logits(model: Any, question: Sequence[int], answer: Sequence[int]) -> Tensor:
    """The same for a question after both documents in parallel, in one pass with masks made by hand."""
    parts = [OPENING, *DOCUMENTS, [*question, *answer]]
    last, longest = len(parts) - 1, max(map(len, DOCUMENTS))
    starts = [0, *(len(OPENING) for _ in DOCUMENTS), len(OPENING) + longest]
    part = torch.tensor([number for number, tokens in enumerate(parts) for _ in tokens])
    places = torch.tensor([start + i for start, tokens in zip(starts, parts, strict=True) for i in range(len(tokens))])
    seen = (places <= places[:, None]) & ((part == part[:, None]) | (part == 0) | (part[:, None] == last))
    near = seen & (places > places[:, None] - WINDOW)
    bias = torch.tensor([0.0, *BIAS, 0.0])[part] * (part[:, None] == last)  # none while documents are read
    logits: Tensor = model(
        input_ids=torch.tensor([[token for tokens in parts for token in tokens]]),
        position_ids=places[None],
        attention_mask=masks_by_hand(model, seen, near, bias),
    ).logits
    return logits[0, -len(answer) - 1 : -1]


@dataclass
class Read:
    """An LM and the keys and values of the opening and of all documents, which it has read in one batch."""

    lm: BaseLM
    opening: Tensor
    rows: list[Tensor]

    @classmethod
    def by(cls, model: Any) -> Read:
        lm = lm_of_numbers(model)
        opening = lm.keys_values(OPENING)
        nothing: list[list[Any]] = [[] for _ in DOCUMENTS]
        return cls(lm, opening, lm.keys_values_of(DOCUMENTS, BlockPrefix(opening, nothing, nothing)))

    def memory(self, *documents: Sequence[int], bias: Sequence[float] = (0.0, 0.0)) -> BlockPrefix:
        """For each row the documents of these numbers."""
        rows = [[self.rows[number] for number in row] for row in documents]
        return BlockPrefix(self.opening, rows, [[bias[number] for number in row] for row in documents])

    @torch.no_grad()
    def logits(self, *rows: int) -> list[Tensor]:
        """For each of these rows the logits of its answer, with its own document in memory, all in one batch."""
        answers = [ANSWERS[row] for row in rows]
        logits = self.lm.answer_logits([QUESTIONS[row] for row in rows], answers, self.memory(*([row] for row in rows)))
        return list(logits.split([len(answer) for answer in answers]))

    @torch.no_grad()
    def parallel(self, row: int) -> Tensor:
        """The logits of a row's answer, with both documents in memory."""
        return self.lm.answer_logits([QUESTIONS[row]], [ANSWERS[row]], self.memory([0, 1], bias=BIAS))


def check(model: Any, dtype: str) -> None:
    """Everything that a cell of the matrix promises."""
    read = Read.by(model)
    exact = model if dtype == "fp32" else deepcopy(model).float()
    check_logits(read, exact, dtype)
    check_generation(read, exact, dtype)


def check_logits(read: Read, exact: Any, dtype: str) -> None:
    """Alone, in a batch with padding, and with documents in parallel, logits are those of the plain text."""

    def check_equal(found: Tensor, plain: Tensor, expected: Tensor) -> None:
        assert distance(found, expected) <= 2 * distance(plain, expected) + FLOORS[dtype]

    model, together = read.lm.model, read.logits(0, 1)
    for row, (text, answer) in enumerate(zip(TEXTS, ANSWERS, strict=True)):
        plain, expected = (text_logits(one, text, answer) for one in (model, exact))
        [alone] = read.logits(row)
        check_equal(alone, plain, expected)
        check_equal(together[row], plain, expected)
        other = [*OPENING, *DOCUMENTS[1 - row], *QUESTIONS[row]]
        assert distance(text_logits(exact, other, answer), expected) > LEAST_EFFECT
        parallel = parallel_logits(exact, QUESTIONS[row], answer)
        check_equal(read.parallel(row), parallel_logits(model, QUESTIONS[row], answer), parallel)


def check_generation(read: Read, exact: Any, dtype: str) -> None:
    """`generate` and `stream` give the plain text's tokens, also after another row has ended or joined them."""
    lm, memory = read.lm, read.memory([0], [1])
    generated = lm.generate(QUESTIONS, memory, max_new_tokens=NEW)
    streamed = ["".join(lm.stream(QUESTIONS[row], read.memory([row]), max_new_tokens=NEW)) for row in (0, 1)]
    joined = joining(lm, QUESTIONS, lambda row: read.memory([row]), NEW)
    other_first = joining(lm, QUESTIONS[::-1], lambda row: read.memory([1 - row]), NEW)[::-1]
    if dtype != "fp32":  # near ties may fall either way, but every token is as good as the best
        for answers in (generated, streamed, joined, other_first):
            for text, answer in zip(TEXTS, answers, strict=True):
                tokens = [int(token) for token in answer.split()]
                scores = text_logits(exact, text, tokens)
                short = scores.max(1).values - scores.gather(1, torch.tensor(tokens, dtype=torch.long)[:, None])[:, 0]
                assert (short <= 4 * TOLERANCES[dtype] * scores.std()).all()
        return
    expected = [text_answer(exact, text) for text in TEXTS]
    assert generated == streamed == joined == other_first == [Numbers().decode(answer) for answer in expected]
    for answer in expected:
        lm.end_tokens = [Numbers.eos_token_id, answer[len(answer) // 2]]
        ended = [takewhile(lambda token: token not in lm.end_tokens, one) for one in expected]
        assert lm.generate(QUESTIONS, memory, max_new_tokens=NEW) == [Numbers().decode(one) for one in ended]


@torch.no_grad()
def text_answer(model: Any, text: Sequence[int]) -> list[int]:
    """The greedy answer to a text, the whole sequence anew for each token."""
    answer: list[int] = []
    while len(answer) < NEW and (not answer or answer[-1] != Numbers.eos_token_id):
        answer.append(int(model(input_ids=torch.tensor([[*text, *answer]])).logits[0, -1].argmax()))
    return answer


def marks(place: int, name: str, dtype: str) -> Any:
    """Each architecture is run once, by turns in each dtype; the others are in the matrix."""
    if dtype != list(DTYPES)[place % 3]:
        return [pytest.mark.matrix]
    return [pytest.mark.slow] if name in ALIKE else []


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=marks(place, name, dtype))
        for place, name in enumerate(NAMES)
        for dtype in DTYPES
    ],
)
def test_a_document_in_memory_is_its_text_in_the_prompt(name: str, dtype: str, in_table: InTable) -> None:
    in_table(name, KIND, dtype)
    check(random_lm(name, dtype), dtype)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_rotations_that_are_scaled_for_long_texts(scaling: dict[str, Any]) -> None:
    check(random_lm("llama", rope_parameters=scaling), "fp32")


@pytest.mark.matrix
@pytest.mark.parametrize("quantization", QUANTIZED_TOLERANCES)
@pytest.mark.parametrize("name", NAMES)
def test_quantised_weights(tmp_path: Path, name: str, quantization: str, in_table: InTable) -> None:
    if (name, quantization) == ("qwen2_moe", "nf4"):
        with pytest.raises(QuantizationError, match="shared_expert_gate has a single output") as refused:
            quantized_lm(tmp_path, name, quantization, KIND)
        in_table(name, KIND, quantization, refused.value)
        return
    in_table(name, KIND, quantization)
    read = Read.by(quantized_lm(tmp_path, name, quantization, KIND))
    for row, found in enumerate(read.logits(0, 1)):
        expected = text_logits(read.lm.model, TEXTS[row], ANSWERS[row])
        assert distance(found, expected) < QUANTIZED_TOLERANCES[quantization]
        [alone] = read.logits(row)
        assert distance(alone, expected) < QUANTIZED_TOLERANCES[quantization]
    assert len(read.lm.generate(QUESTIONS, read.memory([0], [1]), max_new_tokens=NEW)) == len(QUESTIONS)


class TestKeysBeforeRotation:
    """What the codec is given: keys without their positions."""

    @staticmethod
    def keys(model: Any, document: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Keys of a document after the opening, the same before rotation, and these rotated again."""
        lm = lm_of_numbers(model)
        start = len(OPENING)
        memory = BlockPrefix(lm.keys_values(OPENING), [[]], [[]])
        keys = lm.keys_values(document, memory)[:, 0]
        rotation = key_rotation(model, range(start, start + len(document)), lm.context_window)
        before = rotation.inverse(keys)
        return keys, before, rotation(before)

    EACH = [
        *(pytest.param(name, {}, id=name) for name in NAMES),
        *(pytest.param("llama", {"rope_parameters": scaling}, id=scaling["rope_type"]) for scaling in SCALINGS),
    ]

    @pytest.mark.parametrize(("name", "changes"), EACH)
    def test_a_rotation_is_inverted(self, name: str, changes: dict[str, Any]) -> None:
        keys, before, again = self.keys(random_lm(name, **changes), DOCUMENTS[0])
        torch.testing.assert_close(again, keys, rtol=0, atol=1e-5 * float(keys.std()))
        assert torch.equal(before, keys) == (name in LEARNED_POSITIONS)

    @pytest.mark.parametrize(("name", "changes"), EACH)
    def test_keys_of_a_token_are_equal_at_all_positions(self, name: str, changes: dict[str, Any]) -> None:
        if name in LEARNED_POSITIONS:
            pytest.skip("learned positions stay in the keys")
        keys, before, _ = (part[0] for part in self.keys(random_lm(name, **changes), [57] * 2 * WINDOW))
        torch.testing.assert_close(before, before[:, :1].expand_as(before), rtol=0, atol=1e-5 * float(keys.std()))
        assert (keys - keys[:, :1]).abs().max() > 0.1 * keys.std()


class TestRefusals:
    """The folders hold a configuration and no weights: nothing else is read."""

    @staticmethod
    def around(folder: Path, name: str, **config: Any) -> None:
        AutoConfig.for_model(name, **config).save_pretrained(folder)
        MACModel.around(BaseLMConfig(name=str(folder)), compression=None, device="cpu", sentence_encoder=None)

    @pytest.mark.parametrize(("name", "reason"), [*WITHOUT_PREFIX, ("llama4_text", "attend within chunks of a text")])
    def test_lms_without_keys_and_values_that_stand_alone(
        self, tmp_path: Path, name: str, reason: str, in_table: InTable
    ) -> None:
        pattern = rf"^{name} cannot remember by its own keys and values: .*{reason}.*; take another LM$"
        with pytest.raises(ModelLoadError, match=pattern) as refused:
            self.around(tmp_path, name, **HYBRIDS.get(name, {}))
        in_table(name, KIND, "", refused.value)

    def test_biases_for_distances(self, tmp_path: Path) -> None:
        pattern = r"^falcon cannot remember by its own keys and values: .*\(ALiBi\).*; take another LM$"
        with pytest.raises(ModelLoadError, match=pattern):
            self.around(tmp_path, "falcon", alibi=True)

    @pytest.mark.parametrize(("name", "reason"), UNSUPPORTED)
    def test_lms_that_take_no_memory_at_all(self, tmp_path: Path, name: str, reason: str, in_table: InTable) -> None:
        with pytest.raises(ModelLoadError, match=f"{name} {reason}") as refused:
            self.around(tmp_path, name)
        in_table(name, KIND, "", refused.value)
