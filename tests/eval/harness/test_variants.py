"""Variants of MAC: grafts, the stories that they train on, and their evaluation against a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eval.harness.variants import Training, evaluate, grafted, stories
from mac_rag.config import ModulationConfig
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from mac_rag.model.checkpoint import read_config
from mac_rag.model.presets import merged


def test_each_story_is_one_sentence_with_one_question() -> None:
    dataset = stories("test", 30, 0)
    assert [question.document_id for question in dataset.questions] == [document.id for document in dataset.documents]
    for document, question in zip(dataset.documents, dataset.questions):
        assert question.answers[0] in document.text
        assert document.text.endswith(".")


def test_nested_values_are_merged() -> None:
    values = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert merged(values, {"a": {"c": {"d": 4}}, "e": {"f": 5}}) == {"a": {"b": 1, "c": {"d": 4}}, "e": {"f": 5}}
    assert values["a"] == {"b": 1, "c": {"d": 2}}


@pytest.mark.parametrize("kind", ["lora", "film"])
def test_a_graft_keeps_all_but_the_fresh_part(tiny_checkpoint: Path, tmp_path: Path, kind: Any) -> None:
    config = read_config(tiny_checkpoint)
    base_lm = config.base_lm.model_copy(update={"name": str(tiny_checkpoint / "base_lm")})
    config = config.model_copy(update={"base_lm": base_lm, "modulation": ModulationConfig(kind=kind)})
    place = grafted(config, tiny_checkpoint, "modulation", tmp_path, 0)
    old, new = (MACModel.from_pretrained(folder, device="cpu") for folder in (tiny_checkpoint, place))
    assert new.config.modulation.kind == kind
    kept = {name: weight for name, weight in old.mac_state().items() if not name.startswith("modulation.")}
    for name, weight in kept.items():
        assert torch.equal(new.mac_state()[name], weight), name
    again = (place / "model.safetensors").stat().st_mtime_ns
    assert grafted(config, tiny_checkpoint, "modulation", tmp_path, 0) == place
    assert (place / "model.safetensors").stat().st_mtime_ns == again


def test_the_answer_loss_equals_a_plain_loop(tiny_model: MACModel) -> None:
    dataset = stories("test", 7, 1)
    row, verdicts = evaluate("row", tiny_model, dataset, 3)
    engine = MACEngine(tiny_model)
    engine.adapt(dataset.documents)
    total, tokens = 0.0, 0
    prompts = tiny_model.base_lm.prompts
    for question in dataset.questions:
        phi = tiny_model.aggregate([question.question], engine.bank.phi)
        answer = prompts.answer(question.answers[0])
        with torch.no_grad():
            modulation = tiny_model.modulation(phi)
            total += float(tiny_model.base_lm.answer_loss([prompts.prompt(question.question)], [answer], modulation))
        tokens += len(answer)
    assert row.measures["answer_loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert row.em == sum(verdict.em for verdict in verdicts) / 7


def test_the_papers_scale_needs_a_preset_and_data() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'mac-tiny'"):
        Training("mac-tiny", "data/squad", Path("variants"), 0, None, "paper")
    with pytest.raises(ConfigError, match="give one with --data"):
        Training("gpt2-xl", None, Path("variants"), 0, None, "paper")
