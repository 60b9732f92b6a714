"""`python -m pipelines.plan`: what a name stands for, the tables of a plan, and the table of presets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mac_rag.errors import ConfigError
from mac_rag.model.presets import PRESETS
from pipelines.plan import preset_table, recipe_of
from pipelines.sizes import PARTS
from tests.pipelines.helpers import command

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "presets.md"


def test_a_preset_is_planned_with_its_own_recipe_or_the_general_one() -> None:
    assert recipe_of("llama2-7b").trainer.batch_size == 32
    own, general = recipe_of("smollm2-135m"), recipe_of("qwen3-0.6b", ["trainer.batch_size=2"])
    assert (own.model, general.model) == (PRESETS["smollm2-135m"], PRESETS["qwen3-0.6b"])
    assert (own.trainer.steps, general.trainer.batch_size) == (200, 2)
    assert recipe_of("gpt2-large/train").model == PRESETS["gpt2-large"]


def test_what_has_no_plan() -> None:
    with pytest.raises(ConfigError, match="no recipe 'mac-huge'"):
        recipe_of("mac-huge")
    with pytest.raises(ConfigError, match="the task tune_qa has no plan"):
        recipe_of("mac-small/reader")
    with pytest.raises(ConfigError, match=r"trainer\.stepz"):
        recipe_of("gpt2-xl", ["trainer.stepz=1"])
    assert "starts from" in str(command("pipelines.plan", "mac-tiny/train-joint").exception)


def test_a_plan() -> None:
    done = command("pipelines.plan", "distilgpt2", "--set", "trainer.batch_size=2")
    assert done.exit_code == 0
    assert "2 documents in a pass, 1 passes in a step, fp32" in done.output
    assert "a document of one chunk in a bank: 18,432 bytes in bf16 or 9,264 bytes in int8" in done.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.output.splitlines() if "│" in line]
    assert [row[0] for row in rows] == [*PARTS, "in all"]
    lm, whole = rows[0], rows[-1]
    assert lm[1:3] == ["81.9", "0.0"]
    assert float(whole[2]) == pytest.approx(173.0, abs=0.1)
    assert sum(map(float, whole[3:7])) == pytest.approx(float(whole[7]), abs=0.02)
    for column in (1, 2, 8, 10, 11):
        total = sum(float(row[column].replace(",", "")) for row in rows[:-1])
        assert total == pytest.approx(float(whole[column].replace(",", "")), abs=0.3)


@pytest.mark.slow
def test_the_table_in_the_documentation_is_that_of_the_code() -> None:
    [table] = re.findall(r"<!-- table: python -m pipelines\.plan -->\n\n(.*?)\n\n", PAGE.read_text(), re.DOTALL)
    assert table.splitlines() == list(preset_table())
