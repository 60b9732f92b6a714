"""The start of a command: garbage is looked for rarely, and as always once the model is there."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from mac_rag.cli import main, run
from mac_rag.cli.models import load_model


def test_garbage_is_collected_rarely_before_the_model(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = gc.get_threshold()
    seen = []

    def command(app: object) -> None:
        seen.append(gc.get_threshold())
        load_model(str(tiny_checkpoint), None, "")
        seen.append(gc.get_threshold())
        assert gc.get_freeze_count() > 0

    monkeypatch.setattr(main, "run_app", command)
    try:
        main.main()
        assert seen == [(run._OBJECTS, *usual[1:]), usual]
        assert gc.get_threshold() == usual
    finally:
        gc.unfreeze()
    load_model(str(tiny_checkpoint), None, "")
    assert gc.get_freeze_count() == 0  # only a command is frozen, never somebody's process
