"""A model and documents for the command `mac-rag`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def model(tiny_checkpoint: Path) -> str:
    return str(tiny_checkpoint)


@pytest.fixture
def notes(tmp_path: Path) -> list[str]:
    """A text, a Markdown file, and two JSON Lines rows."""
    (tmp_path / "a.txt").write_text("Ada Voss opened the harbour of Lund in May.")
    (tmp_path / "b.md").write_text("# Report\nThe bridge of Orm was closed.")
    rows = [
        {"id": "r[1]", "text": "Rain fell on Kell.", "date": "2024-05-01"},
        {"id": "r2", "text": "Snow fell on Tarn."},
    ]
    (tmp_path / "c.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    return [str(tmp_path / name) for name in ("a.txt", "b.md", "c.jsonl")]
