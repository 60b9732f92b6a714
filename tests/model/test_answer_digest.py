"""The answer digest: the same for models that answer alike, another for everything that can change an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mac_rag.errors import MACError
from mac_rag.model import MACModel
from tests.helpers import mac_config, save_instruct
from tests.torture.mutations import copy


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("digest")
    model = MACModel.from_config(mac_config(save_instruct(place / "lm")), device="cpu")
    model.save_pretrained(place / "checkpoint")
    return place / "checkpoint"


def loaded(folder: Path) -> MACModel:
    return MACModel.from_pretrained(folder, device="cpu")


def test_it_stays_when_a_model_is_moved_saved_and_used(saved: Path, tmp_path: Path) -> None:
    model = loaded(saved)
    before = model.answer_digest
    model.generate(["Who?"], modulation=model.aggregate(["Who?"], model.amortize(["Ada opened it."])), max_new_tokens=2)
    assert model.answer_digest == before
    model.save_pretrained(tmp_path / "moved")
    assert loaded(tmp_path / "moved").answer_digest == before


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
def test_it_changes_with_what_changes_answers(
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
def test_it_changes_with_any_weight(saved: Path, part: str) -> None:
    model = loaded(saved)
    before = model.answer_digest
    with torch.no_grad():
        list(getattr(model, part).parameters())[-1].view(-1)[-1] += 1e-3
    assert model.answer_digest != before
