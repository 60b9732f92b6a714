"""Pretraining: what it learns from, what it exports, and that its losses are those of a plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelines.tasks import pretrain
from pipelines.tasks.pretrain import PretrainConfig, PretrainTask
from pipelines.trainer import Trainer
from tests.pipelines.helpers import SHORT_PRETRAINING, TRAINER

RECIPE = PretrainConfig.parse({"trainer": {**TRAINER, "best": "perplexity"}}, "t")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SHORT_PRETRAINING.items():
        monkeypatch.setattr(pretrain, name, value)


def test_an_lm_from_newswire(tmp_path: Path) -> None:
    task = PretrainTask(RECIPE, tmp_path)
    ids, targets = task.batch(0, 0, 3)  # random tokens said twice, the second time as targets
    half = (ids.shape[1] - 1) // 2
    assert torch.equal(ids[:, 1 : half + 1], ids[:, half + 1 :])
    assert (targets[:, : half + 2] == -100).all()
    assert torch.equal(targets[:, half + 2 :], ids[:, half + 2 :])
    ids, _ = task.batch(2, 0, 3)
    assert all("Question:" in text for text in task.tokenizer.batch_decode(ids))
    figures = Trainer(task, RECIPE.trainer, tmp_path).run()
    assert figures.keys() == {"perplexity", "em", "f1"}
    lm, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "last"),
        AutoTokenizer.from_pretrained(tmp_path / "last"),
    )
    assert lm.config.vocab_size == len(tokenizer)
    assert (
        tokenizer.decode(tokenizer("In 2004, $769 million.").input_ids, skip_special_tokens=True)
        == "In 2004, $769 million."
    )


def test_the_loss_is_the_mean_over_the_tokens_after_the_first(tmp_path: Path) -> None:
    task = PretrainTask(RECIPE, tmp_path)
    batch = task.batch(2, 0, 4)  # the first after those on copies
    assert torch.equal(batch[1] == -100, batch[0] == task.tokenizer.pad_token_id)
    total, count = 0.0, 0
    with torch.no_grad():
        for row in batch[0]:
            text = row[row != task.tokenizer.pad_token_id]
            logits = task.lm(input_ids=text[None]).logits[0, :-1].double().log_softmax(-1)
            total -= float(logits.gather(1, text[1:, None]).sum())
            count += len(text) - 1
        assert float(task(batch)["loss"]) == pytest.approx(total / count, rel=1e-5)
