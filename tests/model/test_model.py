"""MACModel: a batch gives what its rows give, checkpoints are checked name by name, digests follow what they cover."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mac_rag.config import AggregationConfig, BaseLMConfig, MACConfig, ModulationConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import BankError, ConfigError, DocumentError, MACError, ModelLoadError
from mac_rag.lm.loading import load_first_layers
from mac_rag.model import AmortizedModel, MACModel, base
from mac_rag.model.checkpoint import read_config
from mac_rag.model.presets import PAPER, preset
from pipelines.objective import Batch, LossWeights, mac_loss
from tests.helpers import Folder, built, copy_of, mac_config, reloaded, save_instruct
from tests.torture.mutations import copy

DOCUMENTS = [document.text for document in generate("val", 12).documents]
QUESTIONS = [question.question for question in generate("val", 12).questions]

DESIGNS = [
    ("encoder-decoder", "t5"),
    ("encoder-only", "t5"),
    ("encoder-only", "bert"),
    ("encoder-pooling", "t5"),
    ("encoder-pooling", "bert"),
    ("decoder-only", "gpt2"),
    ("decoder-only", "llama"),
]


@pytest.fixture(scope="module", params=DESIGNS, ids=lambda p: "-".join(p))
def designed(request: pytest.FixtureRequest, model_folder: Folder) -> MACModel:
    """A model that no test changes."""
    design, backbone = request.param
    return built(mac_config(model_folder("gpt2"), model_folder(backbone), design))


def test_padding_never_changes_memory_tokens(designed: MACModel) -> None:
    together = designed.amortize(["Short.", *DOCUMENTS])
    for row, document in zip(together, ["Short.", *DOCUMENTS], strict=True):
        torch.testing.assert_close(row, designed.amortize([document])[0], atol=1e-5, rtol=1e-4)


def test_amortization_in_small_batches_keeps_the_order(designed: MACModel) -> None:
    whole, pieces = designed.amortize(DOCUMENTS), designed.amortize(DOCUMENTS, batch_tokens=64)
    torch.testing.assert_close(whole, pieces, atol=1e-5, rtol=1e-4)


def test_every_document_has_memory_tokens_of_its_own(designed: MACModel) -> None:
    phi = designed.amortize(DOCUMENTS).flatten(1)
    assert torch.cdist(phi, phi).add(torch.eye(len(phi)) * 9).min() > 1e-4


def test_a_pooling_encoder_starts_from_means_of_its_states(model_folder: Folder) -> None:
    config = mac_config(model_folder("gpt2"), model_folder("bert"), "encoder-pooling")
    model = MACModel.from_config(config, device="cpu")
    network: Any = model.amortization.network
    with torch.no_grad():
        ids = torch.tensor([model.amortization.ids(DOCUMENTS[0])])
        states = network.backbone(input_ids=ids).last_hidden_state[0]
        places = (torch.arange(len(states)) + 0.5) / len(states)
        for reach in (0.3, 1.0, 1e4):  # the last: the mean of all
            network.log_reach.fill_(math.log(reach))
            shares = [torch.exp(-0.5 * ((places * 4 - t - 0.5) / reach) ** 2) for t in range(4)]
            expected = torch.stack([(share / share.sum()) @ states for share in shares])
            torch.testing.assert_close(network.states(ids, torch.ones_like(ids))[0], expected, atol=1e-5, rtol=1e-4)


def test_gradients_reach_every_trained_weight(designed: MACModel) -> None:
    weights = LossWeights(direct=1, reconstruction=1, contrastive=1)
    batch = Batch(DOCUMENTS[:3], QUESTIONS[:3], ["an answer", "b", "c d"], [0, 1, 2])
    model = copy_of(designed).train()
    mac_loss(model, batch, weights)[0]["loss"].backward()
    idle = {name for name, p in model.mac_state().items() if p.grad is None}
    # Given embeddings in place of ids, BERT's pooler is the one part that nothing reads.
    assert all("pooler" in name for name in idle), idle
    assert all(p.grad is None for p in model.base_lm.parameters())


@pytest.mark.parametrize(
    ("lm", "kind"),
    [
        ("llama", "prefix"),
        ("gpt2", "lora"),
        ("llama", "film"),
        *(
            pytest.param(*other, marks=pytest.mark.slow)
            for other in (("gpt2", "prefix"), ("llama", "lora"), ("gpt2", "film"))
        ),
    ],
)
def test_checkpoints_come_back_whole(model_folder: Folder, tmp_path: Path, lm: str, kind: str) -> None:
    torch.manual_seed(0)
    config = mac_config(model_folder(lm), model_folder("t5"), "encoder-decoder", modulation=ModulationConfig(kind=kind))
    model = MACModel.from_config(config, device="cpu")
    again = reloaded(model, tmp_path / "saved")
    assert again.fingerprint == model.fingerprint
    phi = model.aggregate(QUESTIONS, model.amortize(DOCUMENTS))
    assert again.generate(QUESTIONS, modulation=phi) == model.generate(QUESTIONS, modulation=phi)
    torch.testing.assert_close(again.amortize(DOCUMENTS), model.amortize(DOCUMENTS))


def test_a_checkpoint_stores_the_requested_dtype(tiny_model: MACModel, tmp_path: Path) -> None:
    tiny_model.save_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    again = MACModel.from_pretrained(tmp_path, device="cpu")
    assert {p.dtype for p in again.parameters()} == {torch.float32}


def test_a_base_lm_of_the_hub_is_named_not_copied(tiny_model: MACModel, tmp_path: Path) -> None:
    hub = tiny_model.config.base_lm.model_copy(update={"name": "someone/some-lm", "revision": "abc"})
    tiny_model.config = tiny_model.config.model_copy(update={"base_lm": hub})
    tiny_model.save_pretrained(tmp_path)
    assert not (tmp_path / "base_lm").exists()
    assert json.loads((tmp_path / "config.json").read_text())["base_lm"]["revision"] == "abc"


@pytest.mark.parametrize("rank", [None, 4])
def test_a_trained_base_lm_travels_with_the_checkpoint(tiny_model: MACModel, tmp_path: Path, rank: int | None) -> None:
    tiny_model.train_base_lm(lora_rank=rank)
    trained = [p for p in tiny_model.base_lm.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.05 * torch.randn_like(parameter))
    again = reloaded(tiny_model, tmp_path)
    assert not any("lora" in name for name, _ in again.named_parameters())
    phi = tiny_model.aggregate(QUESTIONS, tiny_model.amortize(DOCUMENTS))
    prompts = [tiny_model.base_lm.prompts.prompt(question) for question in QUESTIONS]
    answers = [[5, 6, 7]] * len(prompts)
    losses = [m.base_lm.answer_loss(prompts, answers, m.modulation(phi)) for m in (tiny_model.eval(), again)]
    torch.testing.assert_close(*losses, atol=1e-4, rtol=1e-4)


def test_names_that_lead_to_no_model(model_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no-such-model"):
        MACModel.from_pretrained("no-such-model")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        MACModel.from_pretrained(tmp_path)
    config = mac_config(model_folder("llama"))
    config = config.model_copy(update={"base_lm": config.base_lm.model_copy(update={"name": "no/such-lm"})})
    with pytest.raises(ModelLoadError, match="no/such-lm"):
        MACModel.from_config(config, device="cpu")
    with pytest.raises(ConfigError, match="gpt5"):
        preset("gpt5")


def _copied(checkpoint: Path, place: Path, **values: object) -> Path:
    """A copy of a checkpoint with other values in its configuration."""
    path = copy(checkpoint, place / "copy") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return path.parent


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens": 6}, r"amortization\.network\.queries: \[4, 64\] in the file, \[6, 64\]"),
        ({"format": 99}, "format 99"),
        ({"kind": "stranger"}, "of the kind 'stranger', but this version knows amortized"),
        ({"base_lm": {"name": "./../elsewhere"}}, "leads out"),
    ],
)
def test_a_checkpoint_that_its_configuration_does_not_describe(
    tiny_checkpoint: Path, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        MACModel.from_pretrained(_copied(tiny_checkpoint, tmp_path, **values))


def test_the_kind_of_a_model_decides_its_class(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(MACModel.from_pretrained(_copied(tiny_checkpoint, tmp_path, kind="amortized")), AmortizedModel)
    monkeypatch.setattr(base, "_KINDS", dict(base._KINDS))

    class Other(MACModel, kind="other", config_class=BaseLMConfig):
        pass

    other = _copied(tiny_checkpoint, tmp_path / "other", kind="other")
    for load in (AmortizedModel.from_pretrained, read_config):
        with pytest.raises(ModelLoadError, match=r"of the kind 'other', but 'amortized' is needed"):
            load(other)
    with pytest.raises(ConfigError, match="AmortizedModel cannot be built from a BaseLMConfig; give a MACConfig"):
        AmortizedModel.from_config(BaseLMConfig(name="gpt2"))


def test_a_checkpoint_with_missing_and_unknown_weights_names_them(tiny_checkpoint: Path, tmp_path: Path) -> None:
    place = _copied(tiny_checkpoint, tmp_path)
    state = load_file(place / "model.safetensors")
    state["stranger"] = state.pop("aggregation.bank_norm.weight")
    save_file(state, place / "model.safetensors")
    with pytest.raises(ModelLoadError) as error:
        MACModel.from_pretrained(place)
    assert "aggregation.bank_norm.weight: missing" in str(error.value)
    assert "stranger: unknown" in str(error.value)


@pytest.mark.parametrize("file", ["model.safetensors", "base_lm/model.safetensors"])
def test_a_truncated_checkpoint(tiny_checkpoint: Path, tmp_path: Path, file: str) -> None:
    place = _copied(tiny_checkpoint, tmp_path)
    whole = (place / file).read_bytes()
    (place / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError):
        MACModel.from_pretrained(place)


@pytest.mark.parametrize(
    ("design", "backbone"), [("encoder-decoder", "gpt2"), ("decoder-only", "t5"), ("encoder-decoder", "bert")]
)
def test_a_backbone_that_does_not_fit_its_design(model_folder: Folder, design: str, backbone: str) -> None:
    with pytest.raises(ModelLoadError, match=design):
        MACModel.from_config(mac_config(model_folder("llama"), model_folder(backbone), design), device="cpu")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("", "must not be empty"),
        (" \n", "must not be empty"),
        (7, "expected a text, got int"),
        ("word " * 2000, "longer than the limit of 512"),
    ],
)
def test_documents_that_cannot_be_read(tiny_model: MACModel, document: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        tiny_model.amortize(["Fine.", document])


def test_an_empty_bank_is_refused(tiny_model: MACModel) -> None:
    with pytest.raises(BankError, match="the memory bank is empty"):
        tiny_model.aggregate(QUESTIONS, torch.zeros(0, 4, 64))


def test_the_prior_can_be_left_out_for_comparison(tiny_model: MACModel) -> None:
    bank = tiny_model.project(tiny_model.amortize(DOCUMENTS))
    with_prior = tiny_model.aggregate(QUESTIONS, bank)
    with tiny_model.without_document_prior():
        without = tiny_model.aggregate(QUESTIONS, bank)
    assert not torch.allclose(with_prior, without)
    torch.testing.assert_close(tiny_model.aggregate(QUESTIONS, bank), with_prior)


@pytest.mark.parametrize("name", PAPER)
def test_presets_are_the_papers(name: str) -> None:
    config = preset(name)
    assert config.tokens == (12 if name == "distilgpt2" else 24)
    assert config.aggregation == AggregationConfig(blocks=4, heads=8, head_width=96, prior_width=0)
    assert config.amortization.design == "encoder-decoder"
    assert (config.base_lm.quantization == "nf4") == (name in {"gpt2-xl", "llama2-7b"})


@pytest.mark.parametrize("kind", ["prefix", "lora", "film"])
def test_answers_are_those_of_any_grouping_of_the_prompts(kind: Any, model_folder: Folder) -> None:
    config = mac_config(model_folder("gpt2"), model_folder("bert"), "encoder-only")
    model = built(config.model_copy(update={"modulation": ModulationConfig(kind=kind)}))
    with torch.no_grad():  # maps to a change start at zero
        for parameter in model.modulation.parameters():
            parameter.add_(torch.randn_like(parameter))
    contexts = [DOCUMENTS[: index % 3] for index in range(len(QUESTIONS))]  # neither ascending nor all alike
    phi = model.aggregate(QUESTIONS, model.amortize(DOCUMENTS))

    def answers(memory: bool, weight: float = 1.0) -> list[str]:
        modulation = phi if memory else None
        return model.generate(QUESTIONS, contexts, modulation=modulation, max_new_tokens=6, memory_weight=weight)

    given = {}
    for budget in (1, 100, 10**6):  # one by one, a few, all at once
        model.cpu_batch_tokens = budget
        given[budget] = [answers(False), answers(True), answers(True, 0.6)]
    assert all(answers == given[1] for answers in given.values())
    assert len({tuple(rows) for rows in given[1]}) == 3
    assert len(set(given[1][0])) >= 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("digest")
    model = MACModel.from_config(mac_config(save_instruct(place / "lm")), device="cpu")
    model.save_pretrained(place / "checkpoint")
    return place / "checkpoint"


def loaded(folder: Path) -> MACModel:
    return MACModel.from_pretrained(folder, device="cpu")


def test_the_answer_digest_stays_when_a_model_is_moved_saved_and_used(saved: Path, tmp_path: Path) -> None:
    model = loaded(saved)
    before = model.answer_digest
    model.generate(["Who?"], modulation=model.aggregate(["Who?"], model.amortize(["Ada opened it."])), max_new_tokens=2)
    assert model.answer_digest == before
    assert reloaded(model, tmp_path / "moved").answer_digest == before


def rewritten(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return rewrite


def other_template(folder: Path) -> None:
    path = folder / "base_lm" / "chat_template.jinja"
    path.write_text(path.read_text() + " ")


@pytest.mark.parametrize(
    ("change", "keeps_fingerprint"),
    [
        (rewritten("config.json", lambda c: c.update(memory_weight=0.5)), True),
        (rewritten("config.json", lambda c: c.update(max_new_tokens=7)), True),
        (rewritten("config.json", lambda c: c.update(context_window=200)), True),
        (rewritten("config.json", lambda c: c["prompt"].update(question="Q {question}\n")), True),
        (rewritten("config.json", lambda c: c["base_lm"].update(dtype="bf16")), True),
        (rewritten("config.json", lambda c: c["aggregation"].update(prior_sharpness=2.0)), False),
        (rewritten("base_lm/config.json", lambda c: c["rope_parameters"].update(rope_theta=5.0)), True),
        (rewritten("base_lm/generation_config.json", lambda c: c.update(eos_token_id=[2, 5])), True),
        (rewritten("base_lm/tokenizer.json", lambda c: c["added_tokens"][3].update(lstrip=True)), True),
        (other_template, True),
    ],
    ids="memory-weight answer-length window prompt dtype sharpness rope end-tokens tokenizer chat-template".split(),
)
def test_the_answer_digest_changes_with_what_changes_answers(
    saved: Path, tmp_path: Path, change: Callable[[Path], None], keeps_fingerprint: bool
) -> None:
    folder = copy(saved, tmp_path / "changed")
    before = loaded(folder)
    change(folder)
    after = loaded(folder)
    assert after.answer_digest != before.answer_digest
    assert (after.fingerprint == before.fingerprint) is keeps_fingerprint


def test_languages_change_no_answer(saved: Path, tmp_path: Path) -> None:
    folder = copy(saved, tmp_path / "changed")
    before = loaded(folder)
    rewritten("config.json", lambda c: c.update(languages=["en", "de"]))(folder)
    after = loaded(folder)
    assert after.config.languages == ("en", "de")
    assert (after.answer_digest, after.fingerprint) == (before.answer_digest, before.fingerprint)
    rewritten("config.json", lambda c: c.update(languages=[]))(folder)
    with pytest.raises(MACError, match="languages"):
        loaded(folder)


@pytest.mark.parametrize("part", ["base_lm", "amortization", "input_encoder", "aggregation", "modulation"])
def test_the_answer_digest_changes_with_any_weight(saved: Path, part: str) -> None:
    model = loaded(saved)
    before = model.answer_digest
    with torch.no_grad():
        list(getattr(model, part).parameters())[-1].view(-1)[-1] += 1e-3
    assert model.answer_digest != before


def around(folder: Path, **base_lm: Any) -> MACConfig:
    values = mac_config(folder, None, "encoder-pooling", modulation=ModulationConfig(attention_sink=True)).model_dump()
    part = {**values["amortization"], "layers": 1, "embeddings": "base-lm", "dtype": "bf16"}
    lm = BaseLMConfig(**{"name": str(folder), "dtype": "bf16", "quantization": "nf4", **base_lm})
    return MACConfig.model_validate({**values, "base_lm": lm, "amortization": part, "input_encoder": part})


def test_encoders_start_from_the_first_layers_unquantised(model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder("llama")
    config = around(folder)
    model = MACModel.from_config(config, device="cpu")
    backbone = model.amortization.network.backbone
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
    first = {name: weight for name, weight in whole.named_parameters() if name.startswith(("layers.0.", "norm."))}
    found = dict(backbone.named_parameters())
    assert found.keys() == first.keys()  # one layer, and no embeddings of its own
    for name, weight in first.items():
        assert found[name].requires_grad
        assert torch.equal(found[name], weight), name
    assert model.base_lm.model.is_quantized
    assert backbone.get_input_embeddings().weight is model.base_lm.model.get_input_embeddings().weight

    loaded = reloaded(model, tmp_path / "saved")
    assert loaded.config.base_lm.quantization == "nf4"
    text = ["Ada Voss was appointed."]
    torch.testing.assert_close(loaded.amortize(text), model.amortize(text), rtol=0, atol=0.1)
    again = reloaded(loaded, tmp_path / "again")  # as a training that starts from it stores it
    assert again.answer_digest == loaded.answer_digest


def test_no_more_layers_start_than_there_are(model_folder: Folder) -> None:
    config = around(model_folder("llama"))
    part = config.amortization.model_copy(update={"layers": 3})
    with pytest.raises(ModelLoadError, match="layers is 3, but llama has 2"):
        MACModel.from_config(config.model_copy(update={"amortization": part, "input_encoder": part}), device="cpu")


def test_files_in_4_bit_are_no_start(model_folder: Folder, tmp_path: Path) -> None:
    MACModel.from_config(around(model_folder("llama")), device="cpu").save_pretrained(tmp_path / "saved")
    with pytest.raises(ModelLoadError, match="holds quantised weights, from which an encoder cannot start"):
        MACModel.from_config(around(tmp_path / "saved" / "base_lm"), device="cpu")


def test_weights_that_are_missing_are_named(model_folder: Folder, tmp_path: Path) -> None:
    whole = AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    state = {name: weight for name, weight in whole.state_dict().items() if "layers.0.mlp.up" not in name}
    whole.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelLoadError, match=r"lacks 1 of the LM's weights, such as layers\.0\.mlp\.up_proj"):
        load_first_layers(BaseLMConfig(name=str(tmp_path)), 1, torch.device("cpu"))
    assert len(list(load_first_layers(BaseLMConfig(name=str(model_folder("gpt2"))), None, torch.device("cpu")).h)) == 2
