"""Around a model whose LM is in 4 bit, baselines start from the LM as it was before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eval.baselines.factory import SCALES, SystemFactory
from eval.baselines.finetuning import FineTuning
from mac_rag.data.newswire.generate import generate
from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from tests.eval.helpers import Evaluate
from tests.helpers import mac_config

Folder = Callable[[str], Path]
STREAM = generate("test", 3, seed=2)


@pytest.fixture(scope="module")
def in_4_bit(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint around a Llama in 4 bit, which it holds."""
    config = mac_config(model_folder("llama"), model_folder("llama"))
    lm = config.base_lm.model_copy(update={"quantization": "nf4", "dtype": "bf16"})
    folder = tmp_path_factory.mktemp("model") / "nf4"
    MACModel.from_config(config.model_copy(update={"base_lm": lm}), device="cpu").save_pretrained(folder)
    return folder


def factory(model: MACModel, **options: Any) -> SystemFactory:
    return SystemFactory(model, SCALES["tiny"], lambda: generate("train", 8), lambda: STREAM, **options)


def test_fine_tuning_starts_from_the_weights_before(in_4_bit: Path, model_folder: Folder) -> None:
    model = MACModel.from_pretrained(in_4_bit, device="cpu")
    system = factory(model, lm=str(model_folder("llama"))).make("uniform", learning_rate=1e-3)
    assert isinstance(system, FineTuning)
    whole = dict(AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.bfloat16).named_parameters())
    for name, weight in system.lm.model.named_parameters():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, whole[name].float()), name
    system.adapt(STREAM.documents)
    assert len(system.answer([STREAM.questions[0].question])) == 1
    changed = dict(system.lm.model.named_parameters())["lm_head.weight"]
    assert not torch.equal(changed, whole["lm_head.weight"].float())
    assert model.base_lm.model.is_quantized  # MAC's own LM stays as it is


def test_an_lm_with_a_name_is_loaded_again(model_folder: Folder) -> None:
    config = mac_config(model_folder("llama"), model_folder("llama"))
    lm = config.base_lm.model_copy(update={"quantization": "nf4", "dtype": "bf16"})
    made = factory(MACModel.from_config(config.model_copy(update={"base_lm": lm}), device="cpu"))
    assert not getattr(made.unquantized_lm.model, "is_quantized", False)
    assert made.unquantized_lm is made.unquantized_lm
    plain = MACModel.from_config(config, device="cpu")
    assert factory(plain).unquantized_lm is plain.base_lm


def test_what_cannot_be_the_start(in_4_bit: Path, model_folder: Folder, tmp_path: Path) -> None:
    model = MACModel.from_pretrained(in_4_bit, device="cpu")
    with pytest.raises(ConfigError, match=r"in nf4, whose weights cannot be updated.*--lm FOLDER"):
        factory(model).make("uniform", learning_rate=1e-3)
    with pytest.raises(ConfigError, match="has another tokenizer"):
        factory(model, lm=str(model_folder("instruct"))).make("uniform", learning_rate=1e-3)


OPTIONS = ("--documents", 3, "--questions", 2, "--learning-rate", 1e-3, "--methods", "uniform,mac")


def test_commands_take_the_lm(evaluate: Evaluate, in_4_bit: Path, model_folder: Folder) -> None:
    made = evaluate("main_table", *OPTIONS, model=in_4_bit)
    assert list(made.rows) == ["MAC"]
    assert "--lm FOLDER" in made.result.not_run["uniform"]
    made = evaluate("main_table", *OPTIONS, "--lm", model_folder("llama"), model=in_4_bit)
    assert list(made.rows) == ["Uniform", "MAC"]


def test_a_method_that_runs_out_of_memory_is_listed(evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    def adapt(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")

    monkeypatch.setattr(FineTuning, "adapt", adapt)
    made = evaluate("main_table", *OPTIONS)
    assert made.result.not_run == {"uniform": "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB."}
    assert list(made.rows) == ["MAC"]
