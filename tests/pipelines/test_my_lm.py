"""The recipe for an LM and documents of one's own: everything else follows from the LM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mac_rag import Document, MACEngine, MACModel
from mac_rag.config import BaseLMConfig
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import ConfigError, ModelLoadError
from mac_rag.model.presets import around, sized_for
from pipelines.recipe import load_recipe
from pipelines.tasks.train_config import TrainConfig
from tests.helpers import CHATML, save_gpt2, save_instruct, save_llama, save_tokenizer
from tests.pipelines.helpers import command


@pytest.fixture
def lm(tmp_path: Path) -> Path:
    """An instruct LM of width 64."""
    folder = save_llama(tmp_path / "lm")
    save_tokenizer(folder, "<s> $A", CHATML)
    return folder


def test_sizes_and_prompts_follow_from_the_lm(lm: Path, tmp_path: Path) -> None:
    config = around(BaseLMConfig(name=str(lm), dtype="fp16"))
    sized = sized_for(str(lm), width=64, layers=2)
    assert config.base_lm == BaseLMConfig(name=str(lm), dtype="fp16")
    assert config.amortization == config.input_encoder == sized.amortization.model_copy(update={"dtype": "fp16"})
    assert config.prompt.chat
    kept = {"base_lm", "amortization", "input_encoder", "prompt"}
    assert config.model_dump(exclude=kept) == sized.model_dump(exclude=kept)
    assert not around(BaseLMConfig(name=str(save_llama(tmp_path / "without a template")))).prompt.chat
    file = lm / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 131_072}))
    assert around(BaseLMConfig(name=str(lm))).context_window == 8192


def test_an_lm_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="width is 32"):
        around(BaseLMConfig(name=str(save_instruct(tmp_path / "lm"))))
    with pytest.raises(ModelLoadError, match=r"lm\.gguf.*safetensors"):
        around(BaseLMConfig(name=str(tmp_path), gguf_file="lm.gguf"))
    with pytest.raises(ModelLoadError, match="no such"):
        around(BaseLMConfig(name=str(tmp_path / "no such")))


def test_a_model_around_any_lm_is_built(tmp_path: Path) -> None:
    model = MACModel.from_config(around(BaseLMConfig(name=str(save_gpt2(tmp_path / "lm")))), device="cpu")
    engine = MACEngine(model)
    engine.adapt([Document("a", "A storm has hit Wunville.")])
    assert len(engine.answer(["Where was the storm?"])) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.path=x"], r"names no LM: --set model\.base_lm\.name=LM"),
        (["data.path=x", "model.base_lm=lm"], "names no LM"),
        (["data.path=x", "model.base_lm.name=LM", "model.base_lm.dtyp=bf16"], r"(?s)model\.base_lm.*dtyp: Extra"),
        (["model.base_lm.name=LM"], r"data: Value error, path is missing.*--set data\.path=FOLDER"),
        (["data.path=x", "model.base_lm.name=LM", "model.tokens=0"], r"model\.tokens: .*greater than or equal to 1"),
        (["data.path=x", "model.base_lm.name=LM", "trainer.stps=3"], r"trainer\.stps: Extra inputs"),
    ],
)
def test_what_is_missing_or_wrong_is_named(lm: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(TrainConfig, "my-lm", [override.replace("LM", str(lm)) for override in overrides])


def test_from_an_lm_and_questions_to_a_model(lm: Path, tmp_path: Path) -> None:
    """The commands of the guide, with a small LM and few steps."""
    data = generate("train", 30, questions_per_document=2)
    rows = [
        {"id": q.id, "document_id": q.document_id, "question": q.question, "answers": q.answers} for q in data.questions
    ]
    documents = [{"id": d.id, "text": d.text} for d in data.documents]
    (tmp_path / "data").mkdir()
    for name, lines in (("documents", documents), ("questions", rows)):
        (tmp_path / "data" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    small = {"trainer.steps": 2, "trainer.batch_size": 4, "model.tokens": 8, "trainer.cpu": "true"}
    small |= {"model.base_lm.name": lm, "data.path": tmp_path / "data", "negatives": 8}
    sets = [part for name, value in small.items() for part in ("--set", f"{name}={value}")]
    trained = command("pipelines.train", "--config", "my-lm", "--output", str(tmp_path / "run"), *sets)
    assert trained.exit_code == 0, trained.output
    model = MACModel.from_pretrained(tmp_path / "run" / "last", device="cpu")
    assert (model.config.tokens, model.config.base_lm.dtype, model.config.prompt.chat) == (8, "bf16", True)
