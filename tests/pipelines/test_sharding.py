"""Training in parts (FSDP2) on two processes, as one process trains, and exact after a kill; gradient checkpointing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import DynamicCache

from mac_rag.errors import ConfigError
from mac_rag.lm.batching import length_buckets, one_group, similar_lengths
from mac_rag.model import MACModel
from pipelines.recomputation import recompute_activations, transformer_layers
from pipelines.tasks.train import TrainTask
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import TuneConfig
from pipelines.trainer import Trainer, TrainerConfig
from tests.helpers import Folder
from tests.pipelines import tiny_training
from tests.pipelines.helpers import metrics
from tests.pipelines.test_pipelines import train_recipe
from tests.pipelines.toy_training import ToyTask

ROOT = Path(__file__).parents[2]
FSDP = {"parallel": "fsdp"}


@pytest.fixture
def models(model_folder: Folder) -> Path:
    return {model_folder(name).parent for name in ("llama", "instruct", "t5")}.pop()


def on_two_processes(output: Path, kind: str, models: Path, values: dict[str, Any], **options: Any) -> str | None:
    """Trains by torchrun; returns what it wrote if it failed."""
    arguments = {"output": str(output), "kind": kind, "models": str(models), "values": values, **options}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max_restarts", "0"]
    command = [sys.executable, *launch, "-m", "tests.pipelines.tiny_training", json.dumps(arguments)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    return ended.stderr if ended.returncode else None


def differences(one: Path, other: Path) -> Iterator[tuple[str, float]]:
    """How far apart all figures of two runs are."""
    for first, second in zip(metrics(one), metrics(other), strict=True):
        assert first.keys() == second.keys()
        for name in first.keys() - {"kind"}:
            yield name, abs(first[name] - second[name])


def modulated(**modulation: Any) -> dict[str, Any]:
    return {"model": {"modulation": modulation}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("tune_qa", {}),
        ("tune_qa", {"tune": "lora"}),
        # Without a codec: fitted again at each validation, it turns rounding into other codes.
        ("tune_reading", {"compression": None}),
        ("tune_reading", {"compression": None, "distillation": 0.5, "trainer": {"accumulate": 2}}),
        ("train", {"trainer": {"accumulate": 2}}),
        ("train", {"tune_base_lm": "lora", "trainer": {"parallel": "fsdp-offload", "gradient_checkpointing": True}}),
        ("train", {**modulated(kind="lora"), "tune_base_lm": "full", "trainer": {"gradient_checkpointing": True}}),
        ("train", {**modulated(kind="prefix", attention_sink=True), "tune_base_lm": "full"}),
        ("train", modulated(kind="film")),
    ],
)
def test_two_processes_in_parts_train_as_one(models: Path, tmp_path: Path, kind: str, values: dict[str, Any]) -> None:
    """Twenty steps in float64; the losses themselves are computed in float32."""
    two = tiny_training.merged({"trainer": FSDP}, values)
    assert on_two_processes(tmp_path / "two", kind, models, two) is None
    accumulate = 2 * values.get("trainer", {}).get("accumulate", 1)
    one = tiny_training.merged(values, {"trainer": {"accumulate": accumulate, "gradient_checkpointing": False}})
    one["trainer"] |= FSDP
    tiny_training.train(tmp_path / "one", kind, models, one)
    assert len(metrics(tmp_path / "two")) == 20 + 2
    for name, difference in differences(tmp_path / "two", tmp_path / "one"):
        assert difference < 1e-5, name
    for exported in ("best", "last"):
        files = [sorted((tmp_path / run / exported).rglob("*.safetensors")) for run in ("one", "two")]
        assert len(files[0]) == len(files[1]) > 0
        for first, second in zip(*files, strict=True):
            whole, gathered = load_file(first), load_file(second)
            assert whole.keys() == gathered.keys()
            for name in whole:
                torch.testing.assert_close(gathered[name], whole[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_killed_process_goes_on_exactly_from_the_rows_of_both(models: Path, tmp_path: Path) -> None:
    """In fp32 around a frozen LM in bf16, with validation by generation, negatives and distractors."""
    values = {"model": {"base_lm": {"dtype": "bf16"}}, "negatives": 9, "distractors": 1, "trainer": FSDP}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert on_two_processes(whole, "train", models, values, double=False) is None
    failed = on_two_processes(killed, "train", models, values, double=False, kill=16)
    assert failed is not None
    assert "SIGKILL" in failed or "-9" in failed
    [checkpoint] = (killed / "checkpoints").iterdir()
    assert {path.name for path in checkpoint.iterdir()} == {
        "trainer.json",
        *(f"{kind}-{rank:05d}-of-00002.safetensors" for kind in ("model", "optimizer") for rank in (0, 1)),
    }
    sizes = [(checkpoint / f"optimizer-{rank:05d}-of-00002.safetensors").stat().st_size for rank in (0, 1)]
    assert max(sizes) < 1.2 * min(sizes)
    assert on_two_processes(killed, "train", models, values, double=False) is None
    assert metrics(killed) == metrics(whole)
    prints = [MACModel.from_pretrained(run / "last", device="cpu").answer_digest for run in (killed, whole)]
    assert prints[0] == prints[1]
    for other in (whole, killed):
        assert [path.name for path in (other / "checkpoints").rglob("*")] == ["step-00000020", "trainer.json"]


@pytest.mark.slow
def test_rows_of_two_processes_go_on_in_one(models: Path, tmp_path: Path) -> None:
    """A checkpoint in parts is not bound to the number of processes, only to the passes of a step."""
    assert on_two_processes(tmp_path / "two", "tune_qa", models, {"trainer": FSDP}, kill=8) is not None
    one = {"trainer": {**FSDP, "accumulate": 2}}
    tiny_training.train(tmp_path / "two", "tune_qa", models, one)
    tiny_training.train(tmp_path / "one", "tune_qa", models, one)
    for name, difference in differences(tmp_path / "two", tmp_path / "one"):
        assert difference < 1e-5, name


@pytest.mark.parametrize("modulation", ["prefix", "lora", "film"])
def test_layers_that_are_computed_again_give_the_same_gradients(model_folder: Folder, modulation: str) -> None:
    """Also where the LM trains along, in training mode: transformers' own way would leave the prefix out there."""
    model = train_recipe(model_folder).model
    model = model.model_copy(update={"modulation": model.modulation.model_copy(update={"kind": modulation})})
    recipe = train_recipe(model_folder, model=model.model_dump(), tune_base_lm="full", negatives=0, distractors=0)
    gradients = []
    for again in (False, True):
        task = TrainTask(recipe).train()
        if again:
            recompute_activations(task)
            layers = transformer_layers(task)
            assert len(layers) == 2 + 2 + (2 + 2)  # the LM, the input encoder, and both halves of a T5
            runs = _counted(layers[0])
        torch.manual_seed(0)
        with one_group():
            task(task.batch(0, 0, 3))["loss"].backward()
        gradients.append({name: p.grad for name, p in task.named_parameters() if p.grad is not None})
    assert runs[0] == 2 * runs[1] > 0
    assert gradients[0].keys() == gradients[1].keys()
    for name in gradients[0]:
        torch.testing.assert_close(gradients[1][name], gradients[0][name], rtol=1e-4, atol=1e-7)


def _counted(layer: nn.Module) -> list[int]:
    """How often a layer's attention and the layer itself are called."""
    counts = [0, 0]
    attention = next(part for name, part in layer.named_modules() if name.endswith("q_proj"))

    def count(place: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[place] += 1

        return hook

    attention.register_forward_pre_hook(count(0))
    layer.register_forward_pre_hook(count(1))
    return counts


def test_computing_again_fills_no_cache_of_the_caller(model_folder: Folder) -> None:
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model_folder("llama"))
    recompute_activations(nn.ModuleList([lm]))
    states = torch.randn(1, 2, 3, 16)
    cache = DynamicCache([(states, states), (states, states)])
    lm(torch.tensor([[5, 6]]), past_key_values=cache).logits.sum().backward()
    assert cache.get_seq_length() == 3


def test_in_one_group_all_lengths_share_a_batch() -> None:
    lengths = [9, 1, 100, 5]
    with one_group():
        assert similar_lengths(lengths, 1.5) == length_buckets(lengths, 20) == [[1, 3, 0, 2]]
    assert len(similar_lengths(lengths, 1.5)) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"without_memory": 0.1}, "without_memory is 0.1, but with trainer.parallel: fsdp"),
        ({"group_by_title": 2, "backprop_dropout": 0.5}, "group_by_title is 2, .* set one of them"),
    ],
)
def test_what_parts_cannot_do_is_refused(values: dict[str, Any], message: str) -> None:
    trainer = {"steps": 1, "batch_size": 1, "learning_rate": 1, **values.get("trainer", FSDP)}
    with pytest.raises(ConfigError, match=message):
        TrainConfig.parse({"start_from": "mac-tiny", **values, "trainer": trainer}, "recipe")


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED"])
def test_an_engine_set_in_accelerate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    config = TrainerConfig(steps=1, batch_size=1, learning_rate=0.1, cpu=True)
    with pytest.raises(ConfigError, match=f"asks for {engine}.* set trainer.parallel: fsdp"):
        Trainer(ToyTask(), config, tmp_path)


def test_each_process_loads_where_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its own GPU; in parts, on the CPU, because no GPU may have room for the whole."""
    asked: list[str] = []

    def place(name: str) -> torch.device:
        asked.append(name)
        return torch.device("meta")

    monkeypatch.setattr("pipelines.training_task.default_device", place)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    values = {"steps": 1, "batch_size": 1, "learning_rate": 1}
    for more in ({}, FSDP, {"cpu": True}):
        _ = TuneConfig.parse({"base_lm": {"name": "x"}, "trainer": {**values, **more}}, "recipe").trainer.device
    assert asked == ["cuda:3", "cpu", "cpu"]
