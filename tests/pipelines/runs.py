"""Short runs of the pipelines, and what they log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TRAINER = {
    "steps": 4, "batch_size": 3, "learning_rate": 1e-3, "validate_every": 2, "save_every": 2, "log_every": 1,
    "cpu": True,
}  # fmt: skip


def metrics(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in ("seconds_per_step", "tokens_per_second")}
        for line in lines
    ]
