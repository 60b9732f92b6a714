"""CaMeLS: the gradient through the inner update against finite differences, its parts, and its training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eval.baselines import camels
from eval.baselines.camels import (
    CamelsConfig,
    CamelsWeights,
    Lesson,
    check_proxy,
    drift,
    inner_update,
    meta_loss,
    meta_train,
    new_network,
    parameters,
    trained_network,
)
from eval.baselines.finetuning import passages
from mac_rag.config import BaseLMConfig, PromptFormat
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import ConfigError, ModelLoadError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.model import MACModel

STREAM = generate("train", 12, seed=1)
CONFIG = CamelsConfig(steps=2, accumulate=2, inner_rate=0.05, learning_rate=1e-2, reset_documents=6)


@pytest.fixture(autouse=True)
def few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(camels, "_DOCUMENTS", 2)


@pytest.fixture
def lm(model_folder: Callable[[str], Path]) -> BaseLM:
    """In float64, where finite differences mean something, its weights large enough for curvature.

    A GPT-2, for transformers' Llama computes its norms in single precision whatever its weights are.
    """
    base = BaseLM.load(BaseLMConfig(name=str(model_folder("gpt2"))), PromptFormat(), torch.device("cpu"))
    base.model.double()
    with torch.no_grad():
        for weight in base.model.parameters():
            weight.mul_(2)
    return base


def lesson(lm: BaseLM, index: int) -> Lesson:
    document, question = STREAM.documents[index], STREAM.questions[index]
    ids = next(passages(lm.prompts, document.text, 1024)).ids[:24]
    return Lesson(ids, [(lm.prompts.prompt(question.question), lm.prompts.answer(question.answers[0]))])


def test_the_gradient_through_the_inner_updates_equals_finite_differences(lm: BaseLM) -> None:
    """By the weights that a network gives, through two updates in a row, the answers and the locality term."""
    torch.manual_seed(0)
    network = new_network(lm).double()
    torch.nn.init.normal_(network.outer.weight, std=0.5)
    theta = parameters(lm.model)
    lessons = [lesson(lm, 0), lesson(lm, 1)]

    def loss() -> torch.Tensor:
        return meta_loss(lm.model, network, theta, lessons, lesson(lm, 2).document, rate=0.1, locality=0.5)[0]

    loss().backward()
    for name in ("outer.weight", "inner.bias", "backbone.h.0.mlp.c_fc.weight"):
        weight = network.get_parameter(name)
        direction = torch.randn_like(weight)
        expected = (weight.grad * direction).sum()
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                weight.add_(direction, alpha=step)
                values.append(loss())
                weight.add_(direction, alpha=-step)
        torch.testing.assert_close((values[0] - values[1]) / 2e-5, expected, rtol=1e-5, atol=1e-9)
        assert expected.abs() > 1e-8


def test_an_inner_update_is_a_step_of_gradient_descent(lm: BaseLM) -> None:
    ids = lesson(lm, 0).document
    weights = torch.rand(len(ids), dtype=torch.float64)
    after = inner_update(lm.model, parameters(lm.model), ids, weights, 0.1)
    plain = copy.deepcopy(lm.model).requires_grad_(True)
    logits = plain(input_ids=ids[None]).logits[0]
    losses = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    (weights[1:] * losses).mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(after[name], weight.detach(), msg=name)


def test_drift_is_the_mean_kl_divergence_over_tokens(lm: BaseLM) -> None:
    theta, ids = parameters(lm.model), lesson(lm, 0).document
    after = {name: weight * 1.05 for name, weight in theta.items()}
    assert drift(lm.model, theta, theta, ids).item() == pytest.approx(0, abs=1e-12)
    plain = copy.deepcopy(lm.model)
    plain.load_state_dict(after, strict=False)
    with torch.no_grad():
        old, new = (model(input_ids=ids[None]).logits[0].softmax(-1) for model in (lm.model, plain))
        expected = (old * (old.log() - new.log())).sum(-1).mean()
        torch.testing.assert_close(drift(lm.model, theta, after, ids), expected)


def test_training_is_repeatable_and_changes_the_weights(tiny_model: MACModel) -> None:
    networks = [new_network(tiny_model.base_lm, seed=5) for _ in range(2)]
    start = copy.deepcopy(networks[0].state_dict())
    states = copy.deepcopy(tiny_model.base_lm.model.state_dict())
    losses = [meta_train(network, tiny_model.base_lm, STREAM, CONFIG, seed=1) for network in networks]
    assert losses[0] == losses[1]
    for name, weight in networks[0].state_dict().items():
        assert torch.equal(weight, networks[1].state_dict()[name])
    assert not torch.equal(networks[0].outer.bias, start["outer.bias"])
    assert all(torch.equal(weight, states[name]) for name, weight in tiny_model.base_lm.model.state_dict().items())


def test_a_trained_network_is_cached_by_its_recipe(tiny_model: MACModel, tmp_path: Path) -> None:
    def make(config: CamelsConfig) -> CamelsWeights:
        return CamelsWeights(trained_network(tiny_model.base_lm, STREAM, config, folder=tmp_path))

    first = make(CONFIG)
    [file] = tmp_path.glob("*.safetensors")
    written = file.stat().st_mtime_ns
    passage = next(passages(tiny_model.base_lm.prompts, STREAM.documents[0].text, 1024))
    assert torch.equal(make(CONFIG).weights(passage), first.weights(passage))
    assert file.stat().st_mtime_ns == written
    make(CONFIG.model_copy(update={"steps": 1}))
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(ModelLoadError, match=r"is damaged, delete it"):
        make(CONFIG)


def test_a_new_network_gives_all_tokens_equal_weights(tiny_model: MACModel) -> None:
    passage = next(passages(tiny_model.base_lm.prompts, STREAM.documents[0].text, 1024))
    weights = CamelsWeights(new_network(tiny_model.base_lm)).weights(passage)
    assert weights.shape == passage.ids.shape
    assert torch.equal(weights, weights[:1].expand_as(weights))
    assert weights[0] > 0


def test_a_proxy_of_another_tokenizer_is_refused(tiny_model: MACModel) -> None:
    other = copy.deepcopy(tiny_model.base_lm)
    check_proxy(other, tiny_model.base_lm)
    other.tokenizer.add_tokens(["<new>"])
    with pytest.raises(ConfigError, match="another tokenizer"):
        check_proxy(other, tiny_model.base_lm)


def test_the_lm_returns_to_its_own_weights_after_so_many_documents(
    tiny_model: MACModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []

    def counted(lm: object, network: object, theta: camels.Weights, *rest: object, **options: object) -> object:
        starts.append(theta)
        return meta_loss(lm, network, theta, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(camels, "meta_loss", counted)
    config = CONFIG.model_copy(update={"steps": 7, "accumulate": 1, "reset_documents": 6})
    meta_train(new_network(tiny_model.base_lm), tiny_model.base_lm, STREAM, config)
    assert [theta is starts[0] for theta in starts] == [True, False, False, True, False, False, True]


def test_a_padded_loss_is_a_mean_over_the_padding_too(lm: BaseLM) -> None:
    ids, theta = lesson(lm, 0).document, parameters(lm.model)
    weights = torch.rand(len(ids), dtype=torch.float64)
    plain = inner_update(lm.model, theta, ids, weights, 0.1 * (len(ids) - 1) / 1023)
    padded = inner_update(lm.model, theta, ids, weights, 0.1, padded=1024)
    for name in theta:
        torch.testing.assert_close(padded[name], plain[name])


def test_unrelated_texts_of_a_file_keep_the_lm_in_place(
    tiny_model: MACModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def watched(lm: torch.nn.Module, before: camels.Weights, after: camels.Weights, ids: torch.Tensor) -> torch.Tensor:
        seen.append(ids)
        return drift(lm, before, after, ids)

    monkeypatch.setattr(camels, "drift", watched)
    (tmp_path / "web.jsonl").write_text('{"id": "w", "text": "A recipe for bread."}\n')
    config = CONFIG.model_copy(update={"steps": 1, "unrelated": str(tmp_path / "web.jsonl")})
    meta_train(new_network(tiny_model.base_lm), tiny_model.base_lm, STREAM, config)
    expected = next(passages(tiny_model.base_lm.prompts, "A recipe for bread.", 1024)).ids
    assert len(seen) == CONFIG.accumulate
    assert all(torch.equal(ids, expected) for ids in seen)


def test_low_rank_updates_leave_the_other_weights(tiny_model: MACModel) -> None:
    network, config = new_network(tiny_model.base_lm), CONFIG.model_copy(update={"lora_rank": 2})
    assert len(meta_train(network, tiny_model.base_lm, STREAM, config)) == CONFIG.steps
    assert not any("lora_" in name for name, _ in tiny_model.base_lm.model.named_parameters())
    assert float(network.outer.bias.detach().abs().sum()) > 0
