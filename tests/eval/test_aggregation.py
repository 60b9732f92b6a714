"""eval.aggregation on a tiny model: which rows they write, and what those are held against."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.eval.helpers import Command, Evaluate

SIZES = ("--documents", 16, "--questions", 6, "--batch-size", 4)


def test_hierarchical(evaluate: Evaluate, tiny_checkpoint: Path) -> None:
    result, rows, samples, _ = evaluate("aggregation", "hierarchical", *SIZES, "--subgroups", "2,8")
    assert list(rows) == ["full", "streaming", "hierarchical, M = 2", "hierarchical, M = 8"]
    assert rows["hierarchical, M = 8"].settings == {"method": "hierarchical", "entries": 16, "M": 8}
    full = rows["full"]
    assert full.measures["memory_kept"] == 100
    for row in rows.values():
        kept = row.measures["memory_kept"]
        assert abs(kept - 100 * row.measures["peak_mb"] / full.measures["peak_mb"]) < 1e-9
    assert len(samples) == 6
    assert all(sample.rows["streaming"] == sample.rows["full"] for sample in samples)
    assert result.config["model"] == str(tiny_checkpoint)


def test_subgroups_of_one_are_refused(command: Command) -> None:
    code, _, errors = command("eval.aggregation", "hierarchical", "--subgroups", "1,4")
    assert code == 1
    assert "--subgroups must be at least 2" in errors


def test_reduction(evaluate: Evaluate) -> None:
    rows = evaluate("aggregation", "reduction", *SIZES).rows
    assert next(iter(rows)) == "whole bank"
    assert len(rows) == 1 + 3 * 3
    for share, entries in ((75, 12), (50, 8), (25, 4)):
        row = rows[f"nearest averaging, {share} %"]
        assert row.settings == {"method": "nearest averaging", "entries": entries}
        assert row.measures["bank_mb"] * 16 == pytest.approx(rows["whole bank"].measures["bank_mb"] * entries)


def test_the_papers_scale_needs_data(command: Command) -> None:
    for names in (("eval.aggregation", "hierarchical"), ("eval.aggregation", "reduction"), ("eval.cross_attention",)):
        code, _, errors = command(*names, "--scale", "paper")
        assert code == 1
        assert "give one with --data" in errors
