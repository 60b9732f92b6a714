"""Answers that join others: whatever is written beside them, they are those that the LM gives alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.data.types import Decoded
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.continuous_batch import Answers, CachedRows, ContinuousBatch
from mac_rag.lm.decoding import Sampling, SpanSource
from mac_rag.model import OwnKVModel, ReadRow, ReadRows
from mac_rag.nn.modulation import Modulation, ModulationNetwork
from tests.helpers import Folder, own_kv
from tests.nn.helpers import EACH, PROMPTS, modulated_lm

DOCUMENTS = [
    "The museum in Orsena was opened by Ada Voss. It has nine halls and a tower of red brick.",
    "A ferry crosses the river Vest.",
    "The Kestrel engine was designed by Thomas Webb in 1934. It was built in Coventry until 1947.",
]
SOURCES = [SpanSource((30, 31, 32, 33), (True,) * 4, (True,) * 4), SpanSource.whole([60, 61, 60])]
# How answers are written: sampling and its seed, stop strings, an ensemble, spans, and their lengths.
WAYS: list[dict[str, Any]] = [
    {"max_new_tokens": 9},
    {"max_new_tokens": 1},
    {"max_new_tokens": 5, "sampling": Sampling(temperature=1.5, seed=3)},
    {"max_new_tokens": 12, "sampling": Sampling(log_probabilities=2, presence_penalty=0.5)},
    {"max_new_tokens": 7, "weights": 0.4},
    {"max_new_tokens": 6, "sources": SOURCES},
    {"max_new_tokens": 8, "weights": 0.7, "sources": SOURCES},
]
PLANS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=3),  # the prompts that are read together
        st.sampled_from(WAYS),
        st.integers(0, 4),  # passes of the LM before the next ones come
    ),
    min_size=1,
    max_size=5,
)  # fmt: skip


def options(way: dict[str, Any], rows: int) -> dict[str, Any]:
    """The arguments of `generate` for several prompts."""
    by_row = {name: [way[name]] * rows for name in ("weights", "sources") if name in way}
    return {**way, **by_row}


def told(answers: Sequence[Decoded]) -> list[tuple[str, list[int], bool]]:
    return [(str(one), [token.id for token in one.tokens], one.ended) for one in answers]


def go_on(batch: ContinuousBatch, passes: int | None = None) -> None:
    while batch and passes != 0:
        batch.step()
        passes = None if passes is None else passes - 1


def written(answers: Answers) -> list[Decoded]:
    answers.check()
    return [answers.ended[row] for row in range(len(answers.said))]


@pytest.mark.parametrize(("name", "kind"), EACH)
@settings(max_examples=5, deadline=None)
@given(plan=PLANS)
def test_answers_in_any_order_are_those_of_the_lm_alone(
    model_folder: Folder, name: str, kind: str, plan: list[tuple[list[int], dict[str, Any], int]]
) -> None:
    lm, network, phi = modulated_lm(model_folder(name), kind)
    with torch.no_grad():
        check_joining(lm, network, phi, plan)


def check_joining(lm: BaseLM, network: ModulationNetwork, phi: torch.Tensor, plan: list[Any]) -> None:
    def modulation(rows: list[int], way: dict[str, Any]) -> Modulation | None:
        return None if way["max_new_tokens"] == 5 else network(phi[rows])

    batch, begun = ContinuousBatch(), list[Answers]()
    for rows, way, passes in plan:
        prompts = [PROMPTS[row] for row in rows]
        begun.append(lm.begin(batch, prompts, modulation(rows, way), **options(way, len(rows))))
        go_on(batch, passes)
    go_on(batch)
    for answers, (rows, way, _) in zip(begun, plan, strict=True):
        alone = [lm.generate([PROMPTS[row]], modulation([row], way), **options(way, 1))[0] for row in rows]
        found = written(answers)
        assert told(found) == told(alone)
        for one, other in zip(found, alone, strict=True):
            scores = [[token.log_probability for token in each.tokens] for each in (one, other)]
            if "sampling" in way and way["sampling"].log_probabilities:
                assert scores[0] == pytest.approx(scores[1], abs=1e-6)


@pytest.fixture(scope="module")
def model(model_folder: Folder) -> OwnKVModel:
    return own_kv(model_folder("llama"))


@pytest.fixture(scope="module")
def rows(model: OwnKVModel) -> list[torch.Tensor]:
    return [model.decode(codes) for codes in model.amortize_rows([model.plan(text)[0] for text in DOCUMENTS])]


def asked(model: OwnKVModel, rows: list[torch.Tensor], *documents: int) -> tuple[list[int], Modulation]:
    """A question and its documents, with a bias for each."""
    prompt = model.fit_to_window("Who " + "opened it and " * len(documents) + "when?").after_memory
    seen = ReadRows([[ReadRow(rows[place], -0.3 * place) for place in documents]])
    return list(prompt), model._modulation(seen)


@settings(max_examples=15, deadline=None)
@given(
    plan=st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=3, unique=True), st.integers(1, 10), st.integers(0, 5)),
        min_size=2,
        max_size=6,
    )
)
def test_each_question_sees_its_own_documents(
    model: OwnKVModel, rows: list[torch.Tensor], plan: list[tuple[list[int], int, int]]
) -> None:
    """Prefixes of all lengths stand in one cache; the LM's logits are those of each question alone, in float32."""
    lm, batch, begun = model.base_lm, ContinuousBatch(), list[Answers]()
    sampling = Sampling(log_probabilities=0)
    for documents, most, passes in plan:
        prompt, memory = asked(model, rows, *documents)
        begun.append(lm.begin(batch, [prompt], memory, max_new_tokens=most, sampling=sampling))
        go_on(batch, passes)
        assert len(batch._stacks) <= 1
    go_on(batch)
    for answers, (documents, most, _) in zip(begun, plan, strict=True):
        prompt, memory = asked(model, rows, *documents)
        alone, found = lm.generate([prompt], memory, max_new_tokens=most, sampling=sampling), written(answers)
        assert told(found) == told(alone)
        expected = [token.log_probability for token in alone[0].tokens]
        assert [token.log_probability for token in found[0].tokens] == pytest.approx(expected, abs=1e-4)


def test_one_pass_writes_a_token_of_every_answer(
    model: OwnKVModel, rows: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that comes late has its first token at once, and is over while the others go on."""
    lm, batch, passes = model.base_lm, ContinuousBatch(), list[int]()
    read = lm._read
    monkeypatch.setattr(lm, "_read", lambda ids, *rest: passes.append(len(ids)) or read(ids, *rest))
    sampling = Sampling(bias=tuple((token, -1e9) for token in lm.end_tokens))
    long = [
        lm.begin(batch, [prompt], memory, max_new_tokens=20, sampling=sampling)
        for prompt, memory in (asked(model, rows, 0), asked(model, rows, 1, 2))
    ]
    go_on(batch, 8)
    prompt, memory = asked(model, rows, 2)
    short = lm.begin(batch, [prompt], memory, max_new_tokens=2, sampling=sampling)
    while not short.said[0]:
        batch.step()
    assert passes[8:] in ([1], [2, 1])
    batch.step()
    assert short.over
    assert passes[-1] == 3
    go_on(batch)
    assert all(len(written(answers)[0].tokens) == 20 for answers in long)
    assert max(passes) == 3


def test_prompts_wait_until_there_is_room(
    model: OwnKVModel, rows: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, sampling = model.base_lm, Sampling(bias=tuple((token, -1e9) for token in model.base_lm.end_tokens))
    prompt, memory = asked(model, rows, 0)
    room = 2 * (memory.prefix_length + len(prompt) + 8)
    most = [0]
    read = CachedRows.read

    def counted(self: CachedRows, tokens: torch.Tensor) -> torch.Tensor:
        logits = read(self, tokens)
        most[0] = max(most[0], self.length * len(self))
        return logits

    monkeypatch.setattr(CachedRows, "read", counted)
    batch = ContinuousBatch(room)
    begun = [lm.begin(batch, [prompt], memory, max_new_tokens=8, sampling=sampling) for _ in range(5)]
    go_on(batch)
    [alone] = lm.generate([prompt], memory, max_new_tokens=8, sampling=sampling)
    assert [written(answers)[0] for answers in begun] == [alone] * 5
    assert room / 2 < most[0] <= room
    large = lm.begin(batch, [prompt] * 3, asked_by(model, rows, 3), max_new_tokens=8, sampling=sampling)
    go_on(batch)  # more than there is room for, but nothing else is there
    assert written(large) == [alone] * 3


def asked_by(model: OwnKVModel, rows: list[torch.Tensor], count: int) -> Modulation:
    return model._modulation(ReadRows([[ReadRow(rows[0], 0.0)]] * count))


def test_what_goes_wrong_with_one_is_nothing_to_the_others(model: OwnKVModel, rows: list[torch.Tensor]) -> None:
    lm, batch = model.base_lm, ContinuousBatch()
    prompt, memory = asked(model, rows, 0)
    first = lm.begin(batch, [prompt], memory, max_new_tokens=10)
    go_on(batch, 3)
    bad = lm.begin(batch, [[*prompt, 10**9]], asked(model, rows, 1)[1], max_new_tokens=10)
    last = lm.begin(batch, [prompt], asked(model, rows, 0)[1], max_new_tokens=10)
    go_on(batch)
    assert bad.over
    with pytest.raises(IndexError):
        bad.check()
    assert written(first) == written(last) == lm.generate([prompt], memory, max_new_tokens=10)


def test_answers_that_nobody_waits_for_leave(model: OwnKVModel, rows: list[torch.Tensor]) -> None:
    lm, batch = model.base_lm, ContinuousBatch()
    (prompt, memory), (other, others) = asked(model, rows, 0), asked(model, rows, 1)
    kept = lm.begin(batch, [prompt], memory, max_new_tokens=10)
    running = lm.begin(
        batch, [other] * 2, model._modulation(ReadRows([[ReadRow(rows[1], 0.0)]] * 2)), max_new_tokens=90
    )
    go_on(batch, 5)
    waiting = lm.begin(batch, [other], others, max_new_tokens=90)
    for gone in (running, waiting):
        batch.drop(gone)
        assert gone.over
    batch.step()
    assert [len(one.rows) for one in batch._stacks] == [1]
    go_on(batch)
    assert written(kept) == lm.generate([prompt], asked(model, rows, 0)[1], max_new_tokens=10)
