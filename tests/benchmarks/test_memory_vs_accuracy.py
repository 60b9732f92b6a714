"""The benchmark of memory against accuracy: the whole command on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.memory_vs_accuracy import main
from mac_rag.cli.run import run_command


@pytest.mark.slow
def test_the_command(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "figures" / "out.json"
    options = {"model": tiny_checkpoint, "documents": 16, "questions": 6, "batch-size": 4, "output": output}
    options |= {"subgroups": "2,8"}
    monkeypatch.setattr(sys, "argv", ["x", *(str(part) for name in options for part in (f"--{name}", options[name]))])
    with pytest.raises(SystemExit) as end:
        run_command(main)
    assert end.value.code == 0
    result = json.loads(output.read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert len(rows) == 4 + 9
    assert result["data"]["questions"] == 6
    assert all(row["peak_bytes"] > 0 and 0 <= row["em"] <= row["em_prefix"] <= 1 for row in rows.values())
    assert rows["streaming"]["f1"] == rows["full"]["f1"]
    assert [rows[f"nearest averaging, {share} %"]["entries"] for share in (75, 50, 25)] == [12, 8, 4]
    assert rows["nearest averaging, 25 %"]["bank_bytes"] * 4 == rows["streaming"]["bank_bytes"]
    assert sorted(path.name for path in output.parent.glob("*.png")) == [
        "out-hierarchical.png",
        "out-reduction.png",
    ]
    assert "nearest averaging, 25 %" in capsys.readouterr().out
