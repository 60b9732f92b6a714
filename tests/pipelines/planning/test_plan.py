"""`python -m pipelines.plan`: what a name stands for, what fits, what would help, and the table of presets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mac_rag.config import AttentionConfig
from mac_rag.errors import ConfigError
from mac_rag.model.presets import PRESETS
from pipelines.planning.advice import advice
from pipelines.planning.answering import Asking, answering_memory
from pipelines.planning.empty_model import empty_model
from pipelines.planning.memory import GIB, RESERVED, Memory, gpu_bytes, smallest_gpu
from pipelines.planning.report import make_plan, preset_table, text_lines
from pipelines.planning.subject import subject
from pipelines.planning.training import changed_parts
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import TuneConfig
from tests.helpers import mac_config
from tests.pipelines.helpers import TRAINER, command

Folder = Callable[[str], Path]
PAGE = Path(__file__).parents[3] / "docs" / "guides" / "presets.md"


def recipe_file(folder: Path, name: str, **values: Any) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**values, "trainer": TRAINER}))
    return str(path)


class TestSubject:
    def test_a_preset_is_planned_with_its_own_recipe_or_the_general_one(self) -> None:
        assert subject("llama2-7b").recipe.trainer.accumulate == 8
        own, general = subject("smollm2-135m").recipe, subject("qwen3-0.6b", ["trainer.batch_size=2"]).recipe
        assert isinstance(own, TrainConfig)
        assert isinstance(general, TrainConfig)
        assert (own.model, general.model) == (PRESETS["smollm2-135m"], PRESETS["qwen3-0.6b"])
        assert (own.trainer.steps, general.trainer.batch_size) == (200, 2)

    def test_recipes_and_stages(self, tmp_path: Path, model_folder: Folder) -> None:
        assert isinstance(subject("llama2-7b/tune_qa").recipe, TuneConfig)
        assert isinstance(subject("mac-small/reader").recipe, TuneConfig)
        assert isinstance(subject("mac-tiny/train-joint").recipe, TrainConfig)
        lm = {"name": str(model_folder("gpt2"))}
        assert isinstance(subject(recipe_file(tmp_path, "a", base_lm=lm)).recipe, TuneConfig)
        assert isinstance(subject(recipe_file(tmp_path, "b", preset="gpt2-xl", tune="lora")).recipe, TuneConfig)
        assert isinstance(subject(recipe_file(tmp_path, "c", preset="gpt2-xl", base_lm=lm)).recipe, TrainConfig)

    def test_checkpoints(self, tiny_checkpoint: Path) -> None:
        for name in (str(tiny_checkpoint), "mac-tiny"):
            of = subject(name)
            assert make_plan(of, Asking(documents=1)).training.total > 0

    def test_what_has_no_plan(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no recipe 'mac-huge'"):
            subject("mac-huge")
        with pytest.raises(ConfigError, match="the task fit_recency has no plan"):
            subject("mac-small/recency")
        later = subject("mac-tiny/train-joint")
        with pytest.raises(ConfigError, match="the result of another stage; give its folder"):
            make_plan(later, Asking())
        with pytest.raises(ConfigError, match=r"trainer\.stepz"):
            subject("gpt2-xl", ["trainer.stepz=1"])


class TestAnswering:
    def test_the_cache_of_an_lm_is_what_generation_keeps(self, model_folder: Folder) -> None:
        """Layers, keys and values, heads, positions and their width, in the LM's dtype."""
        model = empty_model(mac_config(model_folder("llama")))
        cache = answering_memory(model, Asking(documents=1, questions=3, context=100)).parts["base LM"]
        assert cache["keys and values"] == 3 * (4 + 100) * 2 * 2 * 2 * 16 * 4

    def test_a_bank_grows_up_to_the_cache(self, model_folder: Folder) -> None:
        model = empty_model(mac_config(model_folder("llama")))
        of = lambda documents, **values: answering_memory(  # noqa: E731
            model, Asking(documents=documents), AttentionConfig(**values)
        ).of("bank")
        row, summary = 2 * 2 * 4 * 2 * 8 * 4, 4 * (16 + 2 * 2)
        assert of(10) == 10 * (row + summary)
        assert of(10, cache_dtype="bf16") == 10 * (row // 2 + summary)
        assert of(1000, cache_bytes=5000) == 5000 + 1000 * summary

    def test_two_readings_take_twice_the_cache(self, model_folder: Folder) -> None:
        one, two = (
            answering_memory(empty_model(mac_config(model_folder("llama"), memory_weight=weight)), Asking())
            for weight in (1.0, 0.5)
        )
        assert two.of("keys and values") == 2 * one.of("keys and values")


class TestAdvice:
    def test_what_helps_is_shown_with_its_effect(self) -> None:
        of = subject("qwen3-4b")
        found = advice(of, 24 * GIB)
        assert all(each.memory.total < of.training().total for each in found)
        assert found[0].settings == "--set trainer.batch_size=1 --set trainer.accumulate=32"
        again = subject("qwen3-4b", found[0].settings.removeprefix("--set ").split(" --set "))
        assert again.training().total == found[0].memory.total

    def test_what_adds_up_where_nothing_is_enough_alone(self) -> None:
        found = advice(subject("distilgpt2"), 1 * GIB)
        assert found[-1].memory.total < min(each.memory.total for each in found[:-1])
        assert "batch_size=1" in found[-1].settings
        assert "quantization=nf4" in found[-1].settings
        assert "precision=bf16" not in found[-1].settings  # at one document its copies are more than it saves

    @pytest.mark.slow
    def test_a_tuning(self) -> None:
        settings = [each.settings for each in advice(subject("distilgpt2/tune_qa"), GIB)]
        assert "--set tune=lora" in settings


def test_parts_that_no_loss_reaches_are_not_optimised() -> None:
    def changed(**losses: float) -> set[str]:
        values = {"preset": "gpt2-xl", "losses": {"answer": 0, **losses}, "trainer": TRAINER}
        return changed_parts(TrainConfig.model_validate(values))

    assert changed(direct=1) == {"amortization network", "modulation"}
    assert changed(contrastive=1) == {"amortization network", "input encoder", "aggregation network"}
    assert len(changed(answer=1)) == 4


class TestGPU:
    @pytest.mark.parametrize(
        ("text", "gib"), [("24", 24), ("0.5", 0.5), ("RTX 4090", 24), ("4090", 24), ("a100-80gb", 80), ("h100", 80)]
    )
    def test_sizes_and_names(self, text: str, gib: float) -> None:
        assert gpu_bytes(text) == gib * GIB

    @pytest.mark.parametrize("text", ["", "big", "-1", "0", "nan", "inf", "1e9"])
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match="--gpu"):
            gpu_bytes(text)

    def test_some_memory_is_reserved(self) -> None:
        memory = Memory({"a": {"weights": 11 * GIB}})
        assert memory.fits(12 * GIB)
        assert not memory.fits(12 * GIB - 1)
        assert smallest_gpu(memory) == 12
        assert smallest_gpu(Memory({"a": {"weights": 1000 * GIB}})) is None


class TestCommand:
    def test_a_plan(self) -> None:
        done = command("pipelines.plan", "distilgpt2", "--gpu", "8", "--documents", "100")
        assert done.exit_code == 0
        assert "base LM" in done.output
        assert "does not fit into 8.00 GiB" in done.output
        assert "--set trainer.batch_size=1 --set trainer.accumulate=64" in done.output
        assert "100 documents in the bank" in done.output

    def test_json_says_the_same(self) -> None:
        done = command("pipelines.plan", "distilgpt2", "--gpu", "8", "--json")
        values = json.loads(done.output)
        plan = make_plan(subject("distilgpt2"), Asking())
        assert values["parameters"]["base LM"] == 81_912_576
        assert values["training"]["total"] == plan.training.total
        assert values["training"]["fits"] is False
        assert values["answering"]["fits"] is True
        assert values["reserved"] == RESERVED
        assert values["advice"][0]["total"] < plan.training.total
        assert sum(sum(part.values()) for part in values["answering"]["parts"].values()) == values["answering"]["total"]

    def test_without_a_name(self) -> None:
        assert "mistral-7b" in str(command("pipelines.plan").exception)

    def test_without_a_gpu_nothing_is_judged(self) -> None:
        lines = "\n".join(text_lines(make_plan(subject("distilgpt2/tune_qa"), Asking()), None, []))
        assert "fit" not in lines
        assert "bank" not in lines


@pytest.mark.slow
def test_the_table_in_the_documentation_is_that_of_the_code() -> None:
    [table] = re.findall(r"<!-- table: python -m pipelines\.plan --table -->\n\n(.*?)\n\n", PAGE.read_text(), re.DOTALL)
    assert table.splitlines() == list(preset_table())
