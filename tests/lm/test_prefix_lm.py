"""Prefix LMs: who sees whom, in one pass and token by token, documents in parallel, and how they are tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from mac_rag.config import BaseLMConfig, PromptFormat
from mac_rag.errors import ConfigError, DocumentError, ModelLoadError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.loading import load_tokenizer
from mac_rag.lm.prefix_lm import PrefixLM, prefix_mask, repeated_positions
from mac_rag.lm.prompt import PromptEncoder, positions_of, segments_of
from mac_rag.model import MACModel
from pipelines.tasks import tune_qa
from pipelines.tasks.tune_qa import TuneTask
from pipelines.trainer import Trainer
from tests.helpers import VOCABULARY, built, mac_config, reloaded
from tests.lm.helpers import QUESTIONS
from tests.nn.helpers import ANSWERS, PROMPTS
from tests.pipelines.helpers import tune_recipe

PARALLEL = {"prompt": {"parallel_documents": True}}
FORMAT = PromptFormat(parallel_documents=True)
QUESTION = "Which port?"
TEXTS = ["A storm closed the port of Riga.", "The mayor of Lisbon opened a bridge.", "Rain fell."]


@pytest.fixture
def lm(prefix_lm_folder: Path) -> BaseLM:
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


def test_generation_is_what_the_losses_say(lm: BaseLM) -> None:
    together = lm.generate(PROMPTS, None, max_new_tokens=5)
    assert together == [lm.generate([p], None, max_new_tokens=5)[0] for p in PROMPTS]
    whole = lm.answer_loss(PROMPTS, ANSWERS, None)
    one_by_one = [lm.answer_loss([p], [a], None)[0] for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    torch.testing.assert_close(whole, torch.stack(one_by_one))
    assert ["".join(lm.stream(p, None, max_new_tokens=5)) for p in PROMPTS] == together
    # What greedy generation chose is the most likely first token of all, token by token.
    first = lm.model(torch.tensor([PROMPTS[0]]), segment_ids=torch.ones(1, 3)).logits[0, -1]
    losses = lm.answer_loss([PROMPTS[0]] * VOCABULARY, [[token] for token in range(VOCABULARY)], None)
    assert int(losses.argmin()) == int(first.argmax())
    # transformers' own generation reads the prompt as one segment, too.
    written = lm.model.generate(
        torch.tensor([PROMPTS[0]]), max_new_tokens=5, do_sample=False, eos_token_id=lm.end_tokens
    )
    assert lm.tokenizer.decode(written[0, len(PROMPTS[0]) :], skip_special_tokens=True).strip() == together[0]


def test_a_prefix_lm_comes_back_and_carries_a_memory(prefix_lm_folder: Path, tmp_path: Path) -> None:
    assert isinstance(AutoModelForCausalLM.from_pretrained(prefix_lm_folder), PrefixLM)
    model = built(mac_config(prefix_lm_folder), 7)
    again = reloaded(model, tmp_path / "mac", dtype=torch.int8)
    bank = again.amortize(TEXTS)
    assert torch.allclose(bank, model.amortize(TEXTS), atol=0.3)
    phi = again.aggregate(QUESTIONS, bank)
    together = again.generate(QUESTIONS, [TEXTS, ()], modulation=phi)
    assert together == [
        again.generate([q], [c], modulation=p[None])[0] for q, c, p in zip(QUESTIONS, [TEXTS, ()], phi, strict=True)
    ]
    again.config = again.config.model_copy(update={"memory_weight": 0.4})
    mixed = again.generate(QUESTIONS, [TEXTS, ()], modulation=phi)
    assert mixed[1] == together[1]
    assert mixed[0] == "".join(again.stream(QUESTIONS[0], TEXTS, modulation=phi[:1]))


def test_a_prefix_lm_is_tuned_on_one_question_at_a_time(prefix_lm_folder: Path, tmp_path: Path) -> None:
    recipe = tune_recipe(prefix_lm_folder)
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
        TuneTask(tune_recipe(prefix_lm_folder, questions_per_context=2))


def test_documents_apart_are_read_as_from_a_cache(prefix_lm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_qa, "_TOKEN_DROPOUT", 0.0)
    task = TuneTask(tune_recipe(prefix_lm_folder, question_blind=1.0))
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
    task = TuneTask(tune_recipe(prefix_lm_folder, question_blind=0.5))
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
    task = TuneTask(tune_recipe(prefix_lm_folder))
    batch = [sequence._replace(copied=[]) for sequence in task.batch(0, 0, 2)]
    losses = task(batch)
    assert float(losses["pointer"].detach()) == 0
    losses["loss"].backward()


def test_minilm_starts_with_the_frequencies_of_tokens() -> None:
    task = TuneTask(tune_recipe("minilm"))
    with torch.no_grad():
        at_first = float(task(task.batch(0, 0, 4))["answer"])
    assert at_first < 8.5  # all of 30,522 tokens alike would be 10.3


def test_positions_that_were_not_tuned_repeat_the_tuned_ones(tmp_path: Path) -> None:
    task = TuneTask(tune_recipe("minilm", sequence_length=128))
    with torch.no_grad():
        task.lm.bert.embeddings.position_embeddings.weight[:128] += 1
    task.save(tmp_path / "lm")
    table = AutoModelForCausalLM.from_pretrained(tmp_path / "lm").bert.embeddings.position_embeddings.weight
    assert len(table) == 1536
    assert all(table[position].equal(table[1 + (position - 1) % 127]) for position in range(1, 1536))
    assert not table[0].equal(table[127])
    assert repeated_positions(table[:128], 100).equal(table[:100])


@pytest.fixture(params=["float32", "bfloat16"])
def parallel_lm(prefix_lm_folder: Path, request: pytest.FixtureRequest) -> BaseLM:
    lm = BaseLM.load(BaseLMConfig(name=str(prefix_lm_folder)), FORMAT, torch.device("cpu"))
    return lm.to(getattr(torch, request.param))


@pytest.fixture
def model(prefix_lm_folder: Path) -> MACModel:
    return built(mac_config(prefix_lm_folder, prompt=FORMAT), 3)


@given(st.lists(st.lists(st.integers(5, 9), max_size=4), min_size=1, max_size=5))
def test_segments_and_positions(prompts: list[list[int]]) -> None:
    ids = [token for prompt in prompts for token in [1, *prompt]]
    segments, positions = segments_of(ids, [1]), positions_of(segments_of(ids, [1]))
    longest = max((1 + len(prompt) for prompt in prompts[:-1]), default=0)
    wanted = []
    for number, prompt in enumerate(prompts, 1):
        first = longest if number == len(prompts) else 0
        segment = 1 if number == len(prompts) else -number
        wanted += [(segment, first + place) for place in range(1 + len(prompt))]
    assert list(zip(segments, positions, strict=True)) == wanted


def test_each_document_is_read_as_if_it_stood_alone(parallel_lm: BaseLM) -> None:
    ids = parallel_lm.prompts.prompt(QUESTION, TEXTS)
    parts = [parallel_lm.prompts.prompt(QUESTION, [text]) for text in TEXTS]
    assert ids == [token for part in parts for token in part] + parallel_lm.prompts.prompt(QUESTION)
    rows, mask, positions, segments = parallel_lm._padded([ids], None)
    cache = parallel_lm.model(rows, attention_mask=mask, position_ids=positions, segment_ids=segments).past_key_values
    end = 0
    for part in parts:
        alone = parallel_lm.model(torch.tensor([part]), segment_ids=torch.ones(1, len(part))).past_key_values
        for layer, own in zip(cache, alone, strict=True):
            for kind in (0, 1):
                torch.testing.assert_close(layer[kind][:, :, end : end + len(part)], own[kind], atol=0.05, rtol=0.02)
        end += len(part)


def test_the_loss_over_parallel_documents_in_float64(prefix_lm_folder: Path) -> None:
    """The documents' keys and values are those of passes of their own, and the rest is read after all of them."""
    lm = BaseLM.load(BaseLMConfig(name=str(prefix_lm_folder)), FORMAT, torch.device("cpu")).double()
    answer = lm.prompts.answer("Riga")
    rows = [[], TEXTS[:1], TEXTS[:2], TEXTS]
    losses = lm.answer_loss([lm.prompts.prompt(QUESTION, texts) for texts in rows], [answer] * 4, None)
    for texts, loss in zip(rows[2:], losses[2:], strict=True):
        parts = [lm.prompts.prompt(QUESTION, [text]) for text in texts]
        caches = [lm.model(torch.tensor([p]), segment_ids=torch.ones(1, len(p))).past_key_values for p in parts]
        cache = caches[0]
        for place, layer in enumerate(cache.layers):
            layer.keys = torch.cat([one.layers[place].keys for one in caches], 2)
            layer.values = torch.cat([one.layers[place].values for one in caches], 2)
        asked = lm.prompts.prompt(QUESTION)
        longest = max(map(len, parts))
        logits = lm.model(
            torch.tensor([asked + answer]),
            position_ids=torch.arange(longest, longest + len(asked) + len(answer))[None],
            segment_ids=torch.tensor([[1] * len(asked) + [0] * len(answer)]),
            past_key_values=cache,
        ).logits[0, len(asked) - 1 : -1]
        wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
        torch.testing.assert_close(loss, wanted, check_dtype=False, rtol=1e-5, atol=1e-5)
    plain = BaseLM(lm.model, lm.tokenizer, PromptFormat())
    prompts = [plain.prompts.prompt(QUESTION, texts) for texts in rows[:2]]
    torch.testing.assert_close(losses[:2], plain.answer_loss(prompts, [answer] * 2, None))


def test_a_batch_answers_as_its_questions_alone(model: MACModel) -> None:
    questions = [QUESTION, "Who opened a bridge in the town of Lisbon?", "What fell?"]
    contexts: list[list[str]] = [TEXTS, TEXTS[:1], TEXTS[1:]]
    phi = model.aggregate(questions, model.amortize(TEXTS))
    together = model.generate(questions, contexts, modulation=phi)
    for place, question in enumerate(questions):
        own = phi[place : place + 1]
        assert model.generate([question], [contexts[place]], modulation=own) == [together[place]]
        assert "".join(model.stream(question, contexts[place], modulation=own)) == together[place]


def test_any_number_of_documents_fits_if_each_does(model: MACModel) -> None:
    fitted = model.fit_to_window(QUESTION, TEXTS * 40)
    assert len(fitted.contexts) == 120
    assert not fitted.truncated
    assert len(fitted.ids) > model.context_window
    assert model.base_lm.prompts.positions(fitted.ids) < 80
    long = "port " * 1000
    reason = r"2 documents and the question take \d+ tokens, but the LM's window leaves"
    with pytest.raises(DocumentError, match=reason):
        model.fit_to_window(QUESTION, [TEXTS[0], long])
    cut = model.fit_to_window(QUESTION, [long, TEXTS[0], long], overflow="truncate")
    assert cut.truncated
    assert cut.contexts[1] == TEXTS[0]
    assert long.startswith(cut.contexts[0])
    assert cut.contexts[0] == cut.contexts[2]
    taken = model.base_lm.prompts.positions(cut.ids)
    assert model.context_window - model.config.max_new_tokens - 3 <= taken
    assert taken <= model.context_window - model.config.max_new_tokens
    model.generate([cut], modulation=model.aggregate([QUESTION], model.amortize(TEXTS)))


@given(st.integers(0, 60), st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_what_is_cut_fits(encoder: PromptEncoder, room: int, lengths: list[int]) -> None:
    texts = ["port " * length for length in lengths]
    fitted = encoder.fit_to_window(QUESTION, texts, room)
    alone = len(encoder.prompt(QUESTION))
    assert encoder.positions(fitted.ids) <= max(room, alone)
    whole = encoder.fit_to_window(QUESTION, texts)
    assert not whole.truncated
    assert fitted.truncated == (encoder.positions(whole.ids) > room)
    if not fitted.truncated:
        assert fitted == whole


@pytest.fixture(scope="module")
def encoder(prefix_lm_folder: Path) -> PromptEncoder:
    lm = BaseLM.load(BaseLMConfig(name=str(prefix_lm_folder)), FORMAT, torch.device("cpu"))
    return lm.prompts


def test_a_document_cannot_begin_a_prompt(encoder: PromptEncoder) -> None:
    ids = encoder.prompt(QUESTION, ["<s> The port </s> <s>", "Riga <s>"])
    assert [token for token in ids if token == encoder.start[0]] == encoder.start * 3
    assert encoder.segment_ids(ids).count(1) == len(encoder.prompt(QUESTION))


def test_where_documents_stand(encoder: PromptEncoder) -> None:
    ids = encoder.prompt(QUESTION, TEXTS)
    for place, text in zip(encoder.places_of_documents(QUESTION, TEXTS), TEXTS, strict=True):
        assert ids[place.start : place.stop] == encoder.prompt_start([text])
    assert encoder.places_of_documents(QUESTION, TEXTS[:1]) == [range(len(encoder.prompt_start(TEXTS[:1])))]


def test_tuning_reads_as_answering_does(prefix_lm_folder: Path) -> None:
    recipe = tune_recipe(prefix_lm_folder, **PARALLEL, context={"retriever": "bm25", "k": [3]}, question_blind=0.5)
    task = TuneTask(recipe)
    base_lm = BaseLM(task.lm.eval(), task.encoder.tokenizer, FORMAT)
    batch = task.batch(0, 0, 6)
    total = count = 0
    for ids, labels, segment_ids, _, copied in batch:
        start = labels.count(-100)
        assert min(segment_ids) == -3
        assert segment_ids[start:] == [0] * (len(ids) - start)
        total += float(base_lm.answer_loss([ids[:start]], [ids[start:]], None).detach())
        count += len(ids) - start
        for place in copied:
            assert ids[place : place + len(ids) - start - 1] == ids[start:-1]
            assert segment_ids[place] < 0
    assert any(sequence.copied for sequence in batch)
    assert float(task(batch)["answer"].detach()) == pytest.approx(total / count, rel=1e-4)


class TestParallelRefusals:
    def test_an_lm_without_segments(self, model_folder: Any) -> None:
        reason = "only an LM whose attention takes segments reads documents in parallel"
        with pytest.raises(ModelLoadError, match=reason):
            BaseLM.load(BaseLMConfig(name=str(model_folder("llama"))), FORMAT, torch.device("cpu"))
        with pytest.raises(ModelLoadError, match=reason):
            TuneTask(tune_recipe(model_folder("gpt2"), **PARALLEL))

    def test_a_tokenizer_without_a_start(self, model_folder: Any) -> None:
        tokenizer, reason = load_tokenizer(str(model_folder("gpt2"))), "puts no token before a text"
        with pytest.raises(ModelLoadError, match=rf"{reason}, .* leave out prompt\.parallel_documents"):
            PromptEncoder(tokenizer, FORMAT)

    def test_a_chat(self) -> None:
        with pytest.raises(ValueError, match="a conversation is one text"):
            PromptFormat(chat=True, parallel_documents=True)
