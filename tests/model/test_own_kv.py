"""A model whose memory is its LM's own keys and values: equal to text, coded, saved, refused; and its codec's rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mac_rag.data.newswire.generate import generate
from mac_rag.errors import ConfigError, DamageError, DocumentError, ModelLoadError, PromptError
from mac_rag.lm.block_attention import BlockAttentionLM
from mac_rag.lm.chat import Message
from mac_rag.model import AmortizedModel, MACModel, OwnKVModel, ReadRow, ReadRows
from mac_rag.nn.block_prefix import BlockPrefix
from mac_rag.nn.rows_prefix import RowsPrefix
from tests.helpers import Folder, own_kv, reloaded

TEXTS = [document.text for document in generate("train", 40).documents]
QUESTIONS = ["Which port was closed?", "Who opened a bridge in the town of Lisbon?", "When?"]


@pytest.fixture(scope="module", params=["llama", "instruct", "gpt2"])
def model(request: pytest.FixtureRequest, model_folder: Folder) -> OwnKVModel:
    """Without a codec; around an LM with and without a chat template, and one with learned positions."""
    return own_kv(model_folder(request.param))


@pytest.fixture(scope="module")
def coded(model_folder: Folder) -> OwnKVModel:
    return own_kv(model_folder("instruct"), TEXTS, compression=4)


def read(model: OwnKVModel, texts: list[str], bias: list[float] | None = None) -> ReadRows:
    """The rows of some documents for one question."""
    codes = model.amortize_rows([row for text in texts for row in model.plan(text)])
    return ReadRows([[ReadRow(model.decode(one), b) for one, b in zip(codes, bias or [0.0] * len(codes))]])


@pytest.mark.parametrize("text", TEXTS[:3])
def test_one_document_in_memory_is_its_text_in_the_prompt(model: OwnKVModel, text: str) -> None:
    memory = read(model, [text])
    for question in QUESTIONS:
        with_text, with_memory = model.fit_to_window(question, [text]), model.fit_to_window(question)
        answer = [model.blocks.answer("the port of Riga")]
        [ours] = model._losses([with_memory], answer, memory)
        [expected] = model._losses([with_text], answer, None)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
        assert (ours - model._losses([with_memory], answer, None)[0]).abs().max() > 1e-3  # it does see the document
        assert model.generate([with_memory], modulation=memory) == model.generate([with_text])


def test_questions_with_different_rows_share_a_batch(model: OwnKVModel) -> None:
    rows = [read(model, TEXTS[:1]), read(model, TEXTS[1:4], [0.0, -0.5, -1.0]), ReadRows([[]])]
    prompts = [model.fit_to_window(question) for question in QUESTIONS]
    together = model.generate(prompts, modulation=ReadRows([row for one in rows for row in one.rows]))
    assert together == [model.generate([p], modulation=r)[0] for p, r in zip(prompts, rows, strict=True)]
    streamed = ["".join(model.stream(p, modulation=r)) for p, r in zip(prompts, rows, strict=True)]
    assert streamed == together


@pytest.mark.parametrize("compression", [None, 4])
def test_kernels_answer_as_padded_prefixes_do(
    model_folder: Folder, compression: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, questions read their rows where they lie; here in Triton's interpreter, which takes its time.

    Of codes, answers are generated as well: their second token is a question of one query.
    """
    pytest.importorskip("triton")
    model = own_kv(model_folder("llama"), TEXTS, compression=compression)
    codes = model.amortize_rows([row for text in TEXTS[:3] for row in model.plan(text)])
    prompts = [model.fit_to_window(question) for question in QUESTIONS]
    answers = [model.blocks.answer(text) for text in ("the port of Riga", "a", "In May")]

    def said() -> tuple[list[torch.Tensor], list[str], list[torch.Tensor]]:
        decoded = model.decode_all(codes)
        seen = [[(0, 0.0)], [(1, 0.0), (0, -0.5), (2, -1.0)], []]
        rows = ReadRows([[ReadRow(decoded[place], bias) for place, bias in own] for own in seen])
        losses = model._losses(prompts, answers, rows)
        said = model.generate(prompts, modulation=rows, max_new_tokens=2) if compression else []
        return list(losses), said, decoded

    plain = said()
    for name in ("_by_kernels", "_code_tables"):
        model.__dict__.pop(name, None)
    monkeypatch.setattr("mac_rag.model.own_kv.is_supported", lambda _: True)
    fast = said()
    assert type(model._modulation(ReadRows([[]]))) is RowsPrefix
    assert (model._code_tables is None) == (compression is None)
    torch.testing.assert_close(fast[2], plain[2], rtol=0, atol=1e-4)
    torch.testing.assert_close(fast[0], plain[0], rtol=0, atol=1e-4)
    assert fast[1] == plain[1]


def test_the_order_of_documents_does_not_matter_and_the_bias_does(model: OwnKVModel) -> None:
    prompt, answer = [model.fit_to_window(QUESTIONS[0])], [model.blocks.answer("Riga")]

    def losses(order: list[int], bias: list[float]) -> torch.Tensor:
        return model._losses(prompt, answer, read(model, [TEXTS[i] for i in order], [bias[i] for i in order]))[0]

    one = losses([0, 1, 2], [0.0, -1.0, -2.0])
    torch.testing.assert_close(losses([2, 0, 1], [0.0, -1.0, -2.0]), one, rtol=0, atol=1e-5)
    assert (losses([0, 1, 2], [-2.0, -1.0, 0.0]) - one).abs().max() > 1e-4


def test_rows_of_low_bias_are_left_out_without_a_trace(model: OwnKVModel) -> None:
    prompt, answer = [model.fit_to_window(QUESTIONS[1])], [model.blocks.answer("the mayor")]
    bias = [0.0, -3.0, -12.5, -40.0]
    everything = model._losses(prompt, answer, read(model, TEXTS[:4], bias))[0]
    kept = model.chosen((place, one, 10) for place, one in enumerate(bias))
    assert kept == [(0, 0.0), (1, -3.0)]
    left = model._losses(prompt, answer, read(model, TEXTS[:2], bias[:2]))[0]
    torch.testing.assert_close(left, everything, rtol=0, atol=1e-4)


def test_a_question_sees_the_best_rows_within_its_budget(model: OwnKVModel) -> None:
    budget = model.config.memory_tokens
    rows = [(1, 3.0, budget - 10), (2, 5.0, 8), (3, 4.0, 5), (4, 2.0, 2)]
    assert model.chosen(rows) == [(2, 0.0), (3, -1.0), (4, -3.0)]
    assert model.chosen([(7, 1.0, 2 * budget)]) == [(7, 0.0)]  # the best one, whatever its length
    assert model.chosen([]) == []


def test_attention_equals_that_of_the_training(model_folder: Folder) -> None:
    """`BlockAttentionLM`, which trains LMs to read, computes block attention by other means."""
    model = own_kv(model_folder("llama"))
    lm = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32).eval()
    blocks = BlockAttentionLM(lm, model.blocks.opening, longest=200)
    documents = [model.plan(text)[0] for text in TEXTS[:3]]
    with torch.no_grad():
        theirs = blocks.read(documents)
        bias = [0.0, -0.7, -1.9]
        question, answer = model.blocks.question(QUESTIONS[0]), model.blocks.answer("Riga")
        expected = blocks.answer_loss(theirs, [(question, answer)], torch.tensor([bias]))
    [ours] = model._losses([model.fit_to_window(QUESTIONS[0])], [answer], read(model, TEXTS[:3], bias))
    torch.testing.assert_close(ours.mean(), expected, rtol=0, atol=1e-4)


def test_documents_read_in_one_batch_are_those_read_alone(model: OwnKVModel) -> None:
    rows = [model.plan(text)[0] for text in TEXTS[:5]]
    for one, row in zip(model.amortize_rows(rows), rows, strict=True):
        assert one.dtype == torch.uint8
        assert len(one) == len(row)
        alone = model.decode(model.amortize_rows([row])[0])
        torch.testing.assert_close(model.decode(one), alone, rtol=0, atol=1e-4)


class TestCodec:
    def test_more_bytes_lose_less(self, model_folder: Folder) -> None:
        raw = own_kv(model_folder("instruct"))
        prompt, answer = [raw.fit_to_window(QUESTIONS[0])], [raw.blocks.answer("Riga")]

        def losses(model: OwnKVModel) -> torch.Tensor:
            return torch.cat([model._losses(prompt, answer, read(model, [text]))[0] for text in TEXTS[:8]])

        exact, errors = losses(raw), []
        for compression in (64, 8, 2):
            coded = raw.compressed(TEXTS, compression)
            assert coded.config.bytes_per_token == raw.raw_bytes // compression
            [codes] = coded.amortize_rows(coded.plan(TEXTS[0]))
            assert codes.shape[1] == coded.config.bytes_per_token
            errors.append(float((losses(coded) - exact).abs().mean()))
        assert errors[0] > errors[1] > errors[2]
        assert errors[2] < 0.05 * errors[0]

    def test_few_tokens_are_warned_of(self, model_folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
        own_kv(model_folder("instruct"), TEXTS[:3], compression=4)
        assert "fewer than 20,000" in caplog.text

    def test_without_documents_there_is_no_codec(self, model_folder: Folder) -> None:
        with pytest.raises(ConfigError, match="compression is 20, but a codec is fitted on documents"):
            MACModel.around(str(model_folder("instruct")), sentence_encoder=None)

    def test_a_compression_that_leaves_nothing_is_refused(self, model_folder: Folder) -> None:
        with pytest.raises(ConfigError, match="bytes per token is 0; choose a number from 1"):
            own_kv(model_folder("instruct"), TEXTS[:3], compression=10**6)


class TestCheckpoints:
    @pytest.mark.parametrize("compression", [None, 4])
    def test_a_folder_gives_the_same_model_and_holds_no_lm(
        self, model_folder: Folder, tmp_path: Path, compression: int | None
    ) -> None:
        model = own_kv(model_folder("instruct"), TEXTS if compression else None, compression=compression)
        model.save_pretrained(tmp_path / "own")
        again = MACModel.from_pretrained(tmp_path / "own", device="cpu")
        assert isinstance(again, OwnKVModel)
        assert (again.config, again.fingerprint, again.answer_digest) == (
            model.config,
            model.fingerprint,
            model.answer_digest,
        )
        [ours], [its] = (one.amortize_rows(one.plan(TEXTS[0])) for one in (model, again))
        assert torch.equal(ours, its)
        names = {file.name for file in (tmp_path / "own").iterdir()}
        assert names == {"config.json", *(["codec.safetensors"] if compression else [])}

    def test_what_writes_rows_changes_the_fingerprint(self, model_folder: Folder) -> None:
        texts = TEXTS[:10]
        models = [own_kv(model_folder("instruct")), own_kv(model_folder("llama"))]
        models += [models[0].compressed(texts, compression) for compression in (4, 8)]
        assert len({model.fingerprint for model in models}) == len(models)
        assert models[0].fingerprint == own_kv(model_folder("instruct")).fingerprint

    def test_another_lm_of_the_same_name_is_refused(self, model_folder: Folder, tmp_path: Path) -> None:
        place = tmp_path / "lm"
        lm = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(model_folder("llama"))
        lm.save_pretrained(place)
        tokenizer.save_pretrained(place)
        own_kv(place).save_pretrained(tmp_path / "own")
        with torch.no_grad():
            lm.model.layers[0].mlp.up_proj.weight[0, 0] += 1
        lm.save_pretrained(place)
        with pytest.raises(ModelLoadError, match=f"other weights of '{place}'.*mac-rag init"):
            MACModel.from_pretrained(tmp_path / "own")

    @pytest.mark.parametrize("name", ["config.json", "codec.safetensors"])
    @pytest.mark.parametrize("content", [b"", b"{}", b"\0" * 100])
    def test_damaged_files_are_errors(self, coded: OwnKVModel, tmp_path: Path, name: str, content: bytes) -> None:
        coded.save_pretrained(tmp_path / "own")
        (tmp_path / "own" / name).write_bytes(content)
        with pytest.raises((ModelLoadError, ConfigError), match="own"):
            MACModel.from_pretrained(tmp_path / "own")

    def test_numbers_that_are_not_finite_are_no_codec(self, coded: OwnKVModel, tmp_path: Path) -> None:
        coded.save_pretrained(tmp_path / "own")
        state = load_file(tmp_path / "own" / "codec.safetensors")
        state["mean"][0, 0] = torch.nan
        save_file(state, tmp_path / "own" / "codec.safetensors")
        with pytest.raises(ConfigError, match="a number is not finite; make it again"):
            MACModel.from_pretrained(tmp_path / "own")

    def test_a_full_folder_is_left_alone(self, coded: OwnKVModel, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").write_text("mine")
        with pytest.raises(ConfigError, match="is not empty; give a new folder"):
            coded.save_pretrained(tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]

    def test_it_is_no_amortized_model(self, coded: OwnKVModel, tmp_path: Path) -> None:
        coded.save_pretrained(tmp_path / "own")
        with pytest.raises(ModelLoadError, match="holds a model of the kind 'own-kv', but 'amortized' is needed"):
            AmortizedModel.from_pretrained(tmp_path / "own")

    def test_an_lm_given_as_an_object(self, model_folder: Folder, tmp_path: Path) -> None:
        folder = model_folder("instruct")
        lm, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        model = MACModel.around((lm, tokenizer), compression=None, sentence_encoder=None)
        model.save_pretrained(tmp_path / "own")
        assert MACModel.from_pretrained(tmp_path / "own").fingerprint == model.fingerprint
        lm.config._name_or_path = lm.name_or_path = ""
        with pytest.raises(ConfigError, match="without a name, so it could not be loaded again"):
            MACModel.around((lm, tokenizer), compression=None, sentence_encoder=None).save_pretrained(
                tmp_path / "other"
            )


def test_an_adapter_of_the_training_changes_the_lm_and_its_prompt(model_folder: Folder, tmp_path: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(model_folder("instruct"), dtype=torch.float32)
    adapted = get_peft_model(lm, LoraConfig(r=4, target_modules="all-linear"))
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(tmp_path / "best")
    turn = "Read: {document}\nThen answer: {question}"
    told = {"turn": turn, "system": None, "abstention": "no", "bias_scale": 0.25, "codec": None}
    (tmp_path / "best" / "reading.json").write_text(json.dumps(told))
    model = own_kv(model_folder("instruct"), adapter=tmp_path / "best")
    assert (model.config.turn, model.config.bias_scale) == (turn, 0.25)
    prompt = model.fit_to_window(QUESTIONS[0], TEXTS[:1])
    with torch.no_grad():
        expected = adapted(input_ids=torch.tensor([prompt.ids])).logits[0, -1].log_softmax(-1)
        plain = AutoModelForCausalLM.from_pretrained(model_folder("instruct"))(torch.tensor([prompt.ids])).logits[0, -1]
    [loss] = model._losses([prompt], [[7]], None)
    assert float(loss) == pytest.approx(-float(expected[7]), abs=1e-4)
    assert abs(float(loss) + float(plain.log_softmax(-1)[7])) > 1e-3
    model.save_pretrained(tmp_path / "own")
    again = MACModel.from_pretrained(tmp_path / "own")
    assert again.fingerprint == model.fingerprint != own_kv(model_folder("instruct")).fingerprint
    assert again.generate([prompt]) == model.generate([prompt])
    with pytest.raises(ModelLoadError, match=r"reading\.json"):
        own_kv(model_folder("instruct"), adapter=tmp_path)


def test_its_languages_are_kept_and_change_no_answer(model_folder: Folder, tmp_path: Path) -> None:
    model = own_kv(model_folder("instruct"))
    digest = model.answer_digest
    model.config = model.config.model_copy(update={"languages": ("en",)})
    again = reloaded(model, tmp_path / "own")
    assert again.config.languages == ("en",)
    assert again.answer_digest == digest


class TestPrompts:
    def test_texts_beside_the_memory_stand_before_the_question(self, model: OwnKVModel) -> None:
        prompt = model.fit_to_window("Which port?", [TEXTS[0]])
        decode = model.base_lm.tokenizer.decode
        assert decode(prompt.after_memory).startswith(f"\n\n{TEXTS[0].strip()}")
        assert "Which port?" in decode(prompt.after_memory)
        assert list(prompt.ids[: len(model.blocks.opening)]) == model.blocks.opening

    def test_documents_are_cut_to_the_window_and_the_question_never(self, model: OwnKVModel) -> None:
        long = " ".join(TEXTS)
        with pytest.raises(DocumentError, match=r"2 documents and the question take [\d,]+ tokens"):
            model.fit_to_window("Which port?", [TEXTS[0], long])
        prompt = model.fit_to_window("Which port?", [TEXTS[0], long], overflow="truncate")
        assert prompt.truncated
        assert prompt.contexts[0] == TEXTS[0].strip()
        assert len(prompt.after_memory) <= model.context_window - model.config.max_new_tokens
        with pytest.raises(DocumentError, match="the question takes"):
            model.fit_to_window(long)

    def test_long_documents_are_several_rows(self, model: OwnKVModel) -> None:
        long = " ".join(TEXTS)
        chunks = model.chunks(long)
        assert len(chunks) > 1
        assert "".join(chunks).replace(" ", "") == long.replace(" ", "")
        assert all(len(row) <= model.config.max_document_tokens + 8 for row in model.plan(long))
        with pytest.raises(DocumentError, match="longer than the limit"):
            model.plan(long, whole=True)

    def test_a_conversation_follows_the_documents(self, coded: OwnKVModel) -> None:
        said = [
            Message("system", "Be kind."), Message("user", "Hello."), Message("assistant", "Yes?"),
            Message("user", "Which port?"),
        ]  # fmt: skip
        prompt = coded.fit_conversation(said)
        after = coded.base_lm.tokenizer.decode(prompt.after_memory)
        places = [after.index(text) for text in ("Be kind.", "Hello.", "Yes?", "Which port?")]
        assert places == sorted(places)
        assert coded.generate([prompt], modulation=read(coded, TEXTS[:1]))


def test_a_memory_weight_is_refused(coded: OwnKVModel) -> None:
    with pytest.raises(ConfigError, match=r"memory_weight is 0.5, but a memory of keys and values has none"):
        coded.generate([coded.fit_to_window("Which port?")], modulation=read(coded, TEXTS[:1]), memory_weight=0.5)


class TestRefusals:
    def test_a_window_that_documents_do_not_leave(self, model_folder: Folder) -> None:
        model = own_kv(model_folder("llama"))
        with pytest.raises(
            ConfigError, match=r"context_window is 1000, but \d+ of the LM's 1024 positions are for doc"
        ):
            OwnKVModel(model.config.model_copy(update={"context_window": 1000}), model.base_lm, None)

    def test_an_unknown_rotation_only_where_there_is_a_codec(
        self, model_folder: Folder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = own_kv(model_folder("llama"))

        def unknown(*_: Any) -> Any:
            raise ModelLoadError("llama rotates the keys of layer 1 in an unknown way; set modulation.kind to lora")

        monkeypatch.setattr("mac_rag.model.own_kv.key_rotation", unknown)
        with pytest.raises(ModelLoadError, match=r"unknown way; keep keys and values as they are: compression none$"):
            model.compressed(TEXTS, 4)

    @pytest.mark.parametrize("compression", [0, -1])
    def test_a_compression_that_is_none(self, model_folder: Folder, compression: int) -> None:
        with pytest.raises(ConfigError, match=f"compression is {compression}; give a number of at least 1"):
            own_kv(model_folder("llama"), TEXTS[:2], compression=compression)

    def test_a_configuration_in_place_of_an_lm(self, coded: OwnKVModel) -> None:
        with pytest.raises(ConfigError, match=r"is made by MACModel\.around, not by from_config"):
            MACModel.from_config(coded.config)

    def test_another_dtype_of_weights_that_are_not_stored(self, coded: OwnKVModel, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="the folder holds no weights of the LM; leave it out"):
            coded.save_pretrained(tmp_path / "own", dtype=torch.int8)

    def test_a_conversation_beyond_the_window_or_without_a_template(
        self, model_folder: Folder, coded: OwnKVModel
    ) -> None:
        # Its own system message stands in its place in a prompt, and once more in the turn after the documents.
        with pytest.raises(PromptError, match="shorten its history or its prompts"):
            coded.fit_conversation([Message("user", "Hello. " * 1000)])
        plain = own_kv(model_folder("llama"))
        with pytest.raises(ConfigError, match="has no chat template, so this LM reads no conversations"):
            plain.blocks.conversation([Message("user", "Hello.")])


def test_a_question_may_be_a_text(model: OwnKVModel) -> None:
    memory = read(model, TEXTS[:1])
    assert model.generate([QUESTIONS[0]], modulation=memory) == model.generate(
        [model.fit_to_window(QUESTIONS[0])], modulation=memory
    )
    assert model.generate([QUESTIONS[0]], [TEXTS[:1]]) == model.generate([model.fit_to_window(QUESTIONS[0], TEXTS[:1])])


def test_an_lm_that_answers_from_memory_otherwise_is_refused(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = BlockPrefix.masks

    def wrong(self: BlockPrefix, mask: Any, positions: Any, *rest: Any) -> Any:
        return right(self, mask, positions - 1, *rest)  # a token does not see itself

    monkeypatch.setattr(BlockPrefix, "masks", wrong)
    with pytest.raises(ModelLoadError, match=r"llama answers differently .*the logits differ by"):
        own_kv(model_folder("llama"))


def test_an_lm_that_rotates_keys_otherwise_in_long_texts_reads_short_ones(model_folder: Folder, tmp_path: Path) -> None:
    """Documents are read before the length of a conversation is known."""
    lm = AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    lm.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    lm.config.rope_parameters["original_max_position_embeddings"] = 600
    lm.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_folder("llama")).save_pretrained(tmp_path)
    model = own_kv(tmp_path)
    assert model._reserved + model.context_window == 600
    assert own_kv(tmp_path, TEXTS, compression=4).context_window == model.context_window
    assert own_kv(model_folder("llama")).context_window > model.context_window


def test_keys_and_values_that_are_not_finite_are_not_read(model_folder: Folder) -> None:
    model = own_kv(model_folder("llama"))
    [codes] = model.amortize_rows(model.plan(TEXTS[0]))
    codes.view(torch.float32)[0, 0] = torch.inf
    with pytest.raises(DamageError, match="is not finite; adapt to the document again"):
        model.decode(codes)


def test_what_the_memory_keeps_is_measured(coded: OwnKVModel) -> None:
    kept = coded.kept(TEXTS[:5])
    assert kept.documents == 5
    assert kept.bytes_per_token == coded.config.bytes_per_token
    assert abs(kept.memory - kept.text) < abs(kept.nothing - kept.text)
    raw = OwnKVModel(coded.config.model_copy(update={"bytes_per_token": None}), coded.base_lm, None)
    assert raw.kept(TEXTS[:5]).memory == pytest.approx(kept.text, abs=1e-4)
    with pytest.raises(ConfigError, match="no document has 16 tokens"):
        coded.kept(["Too short."])


def test_errors_cost_what_differences_of_the_loss_say(model_folder: Folder) -> None:
    """The squared gradient of how a text goes on, against central differences of each number of two heads."""
    model = own_kv(model_folder("llama"))
    ids = model.plan(TEXTS[0])[0][:12]
    cost = model._sensitivity([ids, ids[:3]], False)
    layers, _, kv_heads, _, _ = model.opening.shape
    assert cost.shape == (layers, 2, kv_heads)
    [row] = model._read([ids[:6]])

    def loss(numbers: torch.Tensor) -> float:
        phi = BlockPrefix(model.opening, [[numbers]], [[0.0]])
        with torch.no_grad():
            return float(model.base_lm.token_losses([ids[6:7]], [ids[7:]], phi)[0].double().sum())

    for head in ((0, 0, 0), (layers - 1, 1, kv_heads - 1)):
        total = 0.0
        for place in range(row[head].numel()):
            shift = torch.zeros_like(row)
            shift[head].view(-1)[place] = 0.05
            total += ((loss(row + shift) - loss(row - shift)) / 0.1) ** 2
        assert float(cost[head]) == pytest.approx(total, rel=0.02)
    assert torch.equal(model._sensitivity([ids[:3]], False), torch.ones_like(cost))
