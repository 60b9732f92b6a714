"""Pretraining: what it learns from, what it exports, and that its losses are those of a plain loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, T5ForConditionalGeneration

from mac_rag.config import EncoderConfig
from mac_rag.errors import ConfigError, DataError
from mac_rag.lm.loading import load_backbone, load_tokenizer
from pipelines.initializers.minilm_embeddings import minilm_embeddings
from pipelines.tasks.pretrain import PretrainConfig, PretrainTask
from pipelines.tasks.pretrain_t5 import PretrainT5Task
from pipelines.trainer import Trainer
from tests.helpers import DEEP, DIGITS
from tests.pipelines.helpers import TRAINER, metrics


def pretrain_recipe(**values: Any) -> PretrainConfig:
    lm = {"hidden_size": 16, "layers": 2, "heads": 2, "vocabulary": 300}
    return PretrainConfig.parse(
        {"lm": lm, "trainer": {**TRAINER, "best": "perplexity", "best_mode": "min"}, **values}, "t"
    )


def test_an_lm_from_newswire(tmp_path: Path) -> None:
    corpus = {"documents": 60, "validation_documents": 4, "copy_steps": 2}
    recipe = pretrain_recipe(corpus=corpus)
    task = PretrainTask(recipe, tmp_path)
    ids, targets = task.batch(0, 0, 3)  # random tokens said twice, the second time as targets
    half = (ids.shape[1] - 1) // 2
    assert torch.equal(ids[:, 1 : half + 1], ids[:, half + 1 :])
    assert (targets[:, : half + 2] == -100).all()
    assert torch.equal(targets[:, half + 2 :], ids[:, half + 2 :])
    ids, _ = task.batch(2, 0, 3)
    assert all("Question:" in text for text in task.tokenizer.batch_decode(ids))
    figures = Trainer(task, recipe.trainer, tmp_path).run()
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


def test_an_lm_from_text_files(tmp_path: Path) -> None:
    import gzip

    rows = [json.dumps({"text": f"Article {number} is about number {number}. " * 5}) for number in range(40)]
    with gzip.open(tmp_path / "part.jsonl.gz", "wt") as file:
        file.write("\n".join(rows))
    corpus = {"files": str(tmp_path / "*.jsonl.gz"), "sequence_length": 32, "validation_documents": 4}
    recipe = pretrain_recipe(corpus=corpus)
    task = PretrainTask(recipe, tmp_path)
    ids, targets = task.batch(0, 0, 3)
    assert ids.shape == (3, 32)
    assert torch.equal(ids, targets)
    Trainer(task, recipe.trainer, tmp_path).run()
    first, last = (line["perplexity"] for line in metrics(tmp_path) if line["kind"] == "val")
    assert last < first


@pytest.mark.slow
def test_a_t5_from_newswire(tmp_path: Path) -> None:
    """The T5 that is saved says the second half of each row, behind an encoder that reads the first."""
    lm = {"kind": "t5", "hidden_size": 384, "layers": 1, "heads": 2, "tokenizer": "minilm"}
    corpus = {"documents": 12, "validation_documents": 4}
    recipe = pretrain_recipe(corpus=corpus, lm=lm)
    task = PretrainT5Task(recipe, tmp_path)
    assert len(task.tokenizer) == 30_522
    figures = Trainer(task, recipe.trainer, tmp_path).run()
    assert figures.keys() == {"perplexity"}
    saved = T5ForConditionalGeneration.from_pretrained(tmp_path / "last")
    ids, targets = task.batch(0, 0, 3)
    pad, half = task.tokenizer.pad_token_id, ids.shape[1] // 2
    assert (targets[:, :half] == -100).all()
    with torch.no_grad():
        losses = task.token_losses(ids, targets)
        assert losses.shape == (3, ids.shape[1] - 1)
        for row, loss in zip(ids, losses, strict=True):
            said = [i for i in row[half:].tolist() if i != pad]
            logits = saved(input_ids=row[None, :half], decoder_input_ids=torch.tensor([[pad, *said[:-1]]])).logits[0]
            assert 0.5 < float(logits.std()) < 2
            expected = [-float(logits.double().log_softmax(-1)[place, token]) for place, token in enumerate(said)]
            assert loss[half - 1 : half - 1 + len(said)].tolist() == pytest.approx(expected, rel=1e-3)
            assert not loss[: half - 1].any()
            assert not loss[half - 1 + len(said) :].any()
    encoder = EncoderConfig(design="encoder-decoder", name=str(tmp_path / "last"))
    backbone: Any = load_backbone(encoder, torch.device("cpu"))
    assert torch.equal(backbone.get_input_embeddings().weight, saved.get_input_embeddings().weight)
    assert len(load_tokenizer(str(tmp_path / "last"))) == 30_522


def test_a_tokenizer_has_a_vocabulary_of_its_own() -> None:
    with pytest.raises(ConfigError, match="vocabulary is 300, but the tokenizer 'minilm' has its own"):
        pretrain_recipe(lm={"tokenizer": "minilm", "vocabulary": 300})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", r"row 1"),
        ('{"text": "x"}\nnot json', r"row 2"),
        (None, "no file matches"),
        (f'{{"text": "x"}}\n{{"text": "x", "more": {DEEP}}}', r"a\.jsonl, row 2: nested more than 64 deep"),
        (f'{{"text": "x", "number": {DIGITS}}}', r"a\.jsonl, row 1: a number of 5,000 digits"),
        ("\0", "line 1 has a NUL"),
    ],
)
def test_bad_text_files(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "a.jsonl").write_text(content)
    corpus = {"files": str(tmp_path / "*.jsonl"), "sequence_length": 32, "validation_documents": 1}
    with pytest.raises(DataError, match=message):
        PretrainTask(pretrain_recipe(corpus=corpus), tmp_path / "out")


def test_embeddings_of_minilm_know_words() -> None:
    torch.manual_seed(0)
    rows = minilm_embeddings(384)
    assert torch.allclose(rows.norm(dim=1), torch.ones(len(rows)), atol=1e-5)
    king, queen, tractor = load_tokenizer("minilm").convert_tokens_to_ids(["king", "queen", "tractor"])
    assert rows[king] @ rows[tractor] < rows[king] @ rows[queen] < 0.999
