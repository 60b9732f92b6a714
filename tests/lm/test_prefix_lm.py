"""Prefix LMs: who sees whom, in one pass and token by token, and how they are tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from mac_rag.config import PromptFormat
from mac_rag.errors import ConfigError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.prefix_lm import PrefixLM, prefix_mask, repeated_positions
from mac_rag.model import MACModel
from pipelines.tasks import tune_qa
from pipelines.tasks.pointer import places_of
from pipelines.tasks.tune_qa import TuneConfig, TuneTask
from pipelines.trainer import Trainer
from tests.helpers import VOCABULARY, mac_config

PROMPTS = [[1, 30, 31], [1, 40, 41, 42, 43, 44, 45, 46], [1, 50, 51, 52, 53]]
ANSWERS = [[60, 61, 2], [62, 2], [63, 64, 65, 66, 2]]


@pytest.fixture
def lm(prefix_lm_folder: Path) -> BaseLM:
    from mac_rag.config import BaseLMConfig

    return BaseLM.load(BaseLMConfig(name=str(prefix_lm_folder)), PromptFormat(), torch.device("cpu"))


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=4
    ),
    st.integers(0, 2),
    st.sampled_from([2, -1]),
)
def test_the_mask_against_its_definition(rows: list[tuple[int, int, int, int]], past: int, documents: int) -> None:
    length = max(sum(row[1:]) for row in rows) or 1
    padding = [length - sum(row[1:]) for row in rows]
    # The second prompt token has a segment below 0, as a document that is read in parallel.
    segment_ids = torch.tensor(
        [
            [0] * n + [documents] * d + [1, -2, *[1] * p][:p] + [0] * a
            for n, (_, d, p, a) in zip(padding, rows, strict=True)
        ]
    )
    hidden = torch.tensor(
        [
            [False] * n + [i % 2 == 1 for i in range(d)] + [False] * (p + a)
            for n, (_, d, p, a) in zip(padding, rows, strict=True)
        ]
    )
    kept = torch.tensor([[1] * past + [0] * n + [1] * (length - n) for n in padding])
    seen = prefix_mask(segment_ids, hidden, kept, past)
    unhidden = prefix_mask(segment_ids, None, kept, past)
    assert torch.equal(unhidden, prefix_mask(segment_ids, torch.zeros_like(hidden), kept, past))
    for row in range(len(rows)):
        for i in range(length):
            for j in range(past + length):
                segment = int(segment_ids[row, j - past]) if j >= past else 0
                before = j <= past + i and not (j >= past and bool(hidden[row, j - past]))
                if j >= past and int(segment_ids[row, i]) < 0:
                    before = False
                together = segment != 0 and int(segment_ids[row, i]) == segment
                expected = j == past + i or (bool(kept[row, j]) and (before or together))
                assert bool(seen[row, 0, i, j]) == expected


def test_a_prompt_sees_itself_and_an_answer_only_what_was_before(lm: BaseLM) -> None:
    ids = torch.tensor([PROMPTS[1] + ANSWERS[2]])
    prompt = torch.arange(ids.shape[1])[None] < len(PROMPTS[1])

    def changed(place: int) -> torch.Tensor:
        other = ids.clone()
        other[0, place] = 99
        logits = [lm.model(x, segment_ids=prompt.long()).logits[0] for x in (ids, other)]
        return ((logits[0] - logits[1]).abs().amax(-1) > 1e-5).nonzero()[:, 0]

    assert changed(5).tolist() == list(range(ids.shape[1]))  # all of the prompt sees its end
    assert changed(10).tolist() == list(range(10, ids.shape[1]))
    plain = lm.model(ids).logits[:, :4]
    assert torch.allclose(plain, lm.model(ids[:, :4]).logits, atol=1e-5)  # without a prompt it is a causal LM


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_is_what_the_losses_say(lm: BaseLM, beams: int) -> None:
    together = lm.generate(PROMPTS, None, max_new_tokens=5, num_beams=beams)
    assert together == [lm.generate([p], None, max_new_tokens=5, num_beams=beams)[0] for p in PROMPTS]
    whole = lm.answer_loss(PROMPTS, ANSWERS, None)
    one_by_one = [lm.answer_loss([p], [a], None)[0] for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    torch.testing.assert_close(whole, torch.stack(one_by_one))
    if beams == 1:
        assert ["".join(lm.stream(p, None, max_new_tokens=5)) for p in PROMPTS] == together
        # What greedy generation chose is the most likely first token of all, token by token.
        first = lm.model(torch.tensor([PROMPTS[0]]), segment_ids=torch.ones(1, 3)).logits[0, -1]
        losses = lm.answer_loss([PROMPTS[0]] * VOCABULARY, [[token] for token in range(VOCABULARY)], None)
        assert int(losses.argmin()) == int(first.argmax())


def test_a_prefix_lm_comes_back_and_carries_a_memory(prefix_lm_folder: Path, tmp_path: Path) -> None:
    assert isinstance(AutoModelForCausalLM.from_pretrained(prefix_lm_folder), PrefixLM)
    torch.manual_seed(7)
    model = MACModel.from_config(mac_config(prefix_lm_folder), device="cpu")
    model.save_pretrained(tmp_path / "mac", dtype=torch.int8)
    again = MACModel.from_pretrained(tmp_path / "mac", device="cpu")
    texts = ["A storm closed the port of Riga.", "The mayor of Lisbon opened a bridge."]
    bank = again.amortize(texts)
    assert torch.allclose(bank, model.amortize(texts), atol=0.3)
    questions = ["Which port?", "Who opened a bridge in the town of Lisbon?"]
    phi = again.aggregate(questions, bank)
    together = again.generate(questions, [texts, ()], modulation=phi)
    assert together == [
        again.generate([q], [c], modulation=p[None])[0] for q, c, p in zip(questions, [texts, ()], phi, strict=True)
    ]
    again.config = again.config.model_copy(update={"memory_weight": 0.4})
    mixed = again.generate(questions, [texts, ()], modulation=phi)
    assert mixed[1] == together[1]
    assert mixed[0] == "".join(again.stream(questions[0], texts, modulation=phi[:1]))


def tuned(name: str, **values: Any) -> TuneConfig:
    return TuneConfig.parse(
        {
            "base_lm": {"name": name},
            "data": {"documents": 40, "validation_documents": 4},
            "context": {"retriever": "bm25", "k": [1, 2]},
            "trainer": {"steps": 2, "batch_size": 4, "learning_rate": 1e-3, "log_every": 1, "best": "f1", "cpu": True},
            **values,
        },
        "test",
    )


def test_a_prefix_lm_is_tuned_on_one_question_at_a_time(prefix_lm_folder: Path, tmp_path: Path) -> None:
    recipe = tuned(str(prefix_lm_folder))
    task = TuneTask(recipe)
    batch = task.batch(0, 0, 4)
    base_lm = BaseLM(task.lm.eval(), task.encoder.tokenizer, PromptFormat())
    total = count = 0
    for ids, labels, *_ in batch:
        start = next(i for i, label in enumerate(labels) if label != -100)
        assert ids[start:] == labels[start:]
        total += float(base_lm.answer_loss([ids[:start]], [ids[start:]], None).detach())
        count += len(ids) - start
    assert float(task(batch)["answer"].detach()) == pytest.approx(total / count, rel=1e-4)
    Trainer(task, recipe.trainer, tmp_path / "out").run()
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "best"), PrefixLM)
    with pytest.raises(ConfigError, match=r"questions_per_context is 2, .* reads a question at a time; set it to 1"):
        TuneTask(tuned(str(prefix_lm_folder), questions_per_context=2))


def test_documents_apart_are_read_as_from_a_cache(prefix_lm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_qa, "_TOKEN_DROPOUT", 0.0)
    task = TuneTask(tuned(str(prefix_lm_folder), question_blind=1.0))
    lm, total = task.lm.eval(), 0.0
    batch = task.batch(0, 0, 4)
    for ids, labels, segment_ids, *_ in batch:
        apart = segment_ids.count(2)
        assert apart > 0
        start = next(i for i, label in enumerate(labels) if label != -100)
        cache = lm(torch.tensor([ids[:apart]]), segment_ids=torch.ones(1, apart), use_cache=True).past_key_values
        behind = torch.tensor([[1] * (start - apart) + [0] * (len(ids) - start)])
        logits = lm(
            torch.tensor([ids[apart:]]),
            position_ids=torch.arange(apart, len(ids))[None],
            segment_ids=behind,
            past_key_values=cache,
        ).logits[0, start - apart - 1 : -1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[start:]), reduction="sum").detach())
    count = sum(label != -100 for sequence in batch for label in sequence.labels)
    assert float(task(batch)["answer"].detach()) == pytest.approx(total / count, rel=1e-4)


def test_the_pointer_loss_against_a_plain_loop(prefix_lm_folder: Path) -> None:
    task = TuneTask(tuned(str(prefix_lm_folder), question_blind=0.5))
    lm = task.lm.eval()
    lm.set_attn_implementation("eager")
    batch = task.batch(0, 0, 8)
    assert any(hidden for sequence in batch for hidden in sequence.hidden)
    pointer = answer = 0.0
    for ids, labels, segment_ids, hidden, copied in batch:
        out = lm(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            segment_ids=torch.tensor([segment_ids]),
            hidden=torch.tensor([hidden]),
            output_attentions=True,
        )
        weights, start = out.attentions[-1][0].double().detach(), labels.count(-100)
        said = ids[start:-1]
        for step, token in enumerate(said):
            sources = [place + step for place in copied if not hidden[place + step]]
            assert all(ids[source] == token for source in sources)
            if sources:
                pointer -= float(weights[:, start + step - 1, sources].sum(-1).mean().log())
        logits = out.logits[0, start - 1 : -1].detach()
        answer += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[start:]), reduction="sum"))
    assert pointer > 0
    count = sum(len(sequence.ids) - sequence.labels.count(-100) for sequence in batch)
    lm.set_attn_implementation("sdpa")
    losses = {name: float(value.detach()) for name, value in task(batch).items()}
    assert losses == pytest.approx(
        {"loss": (answer + pointer) / count, "answer": answer / count, "pointer": pointer / count}, rel=1e-4
    )


def test_an_answer_that_nothing_holds_points_nowhere(prefix_lm_folder: Path) -> None:
    task = TuneTask(tuned(str(prefix_lm_folder)))
    batch = [sequence._replace(copied=[]) for sequence in task.batch(0, 0, 2)]
    losses = task(batch)
    assert float(losses["pointer"].detach()) == 0
    losses["loss"].backward()


def test_places_of_an_answer() -> None:
    assert places_of([5, 6], [5, 6, 5, 5, 6]) == [0, 3]
    assert places_of([], [5]) == places_of([7], []) == places_of([5, 6], [5]) == []


def test_minilm_starts_with_the_frequencies_of_tokens() -> None:
    task = TuneTask(tuned("minilm"))
    with torch.no_grad():
        at_first = float(task(task.batch(0, 0, 4))["answer"])
    assert at_first < 8.5  # all of 30,522 tokens alike would be 10.3


def test_positions_that_were_not_tuned_repeat_the_tuned_ones(tmp_path: Path) -> None:
    task = TuneTask(tuned("minilm", sequence_length=128))
    with torch.no_grad():
        task.lm.bert.embeddings.position_embeddings.weight[:128] += 1
    task.save(tmp_path / "lm")
    table = AutoModelForCausalLM.from_pretrained(tmp_path / "lm").bert.embeddings.position_embeddings.weight
    assert len(table) == 1536
    assert all(table[position].equal(table[1 + (position - 1) % 127]) for position in range(1, 1536))
    assert not table[0].equal(table[127])
    assert repeated_positions(table[:128], 100).equal(table[:100])
