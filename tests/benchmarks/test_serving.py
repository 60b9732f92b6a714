"""The load run finds what a server loses; a short one, with a kill in its middle, loses nothing."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.serving import Load, Questions, main
from mac_rag.model import MACModel
from tests.server.helpers import serving

TEXT = "The board of Rainga Press met in May."


def test_the_load_run_finds_what_is_lost(tmp_path: Path) -> None:
    with serving(tmp_path, MACModel.from_pretrained("mac-tiny", device="cpu")) as running:
        server: Any = SimpleNamespace(url=running.url)
        load = Load(server, Questions(["Who?"]), 0)
        load.prepare([(name, TEXT + name) for name in ("kept", "gone", "back")])
        load.acknowledged |= {"kept": True, "gone": True, "back": False}
        assert load.lost() == {"back"}
        running.service.catalog.get("load").forget(["gone"])
        assert load.lost() == {"gone", "back"}
        running.service.catalog.get("load").forget(["back"])
        assert load.lost() == {"gone"}


@pytest.mark.slow
def test_a_load_run_with_a_kill_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    main(model="mac-tiny", documents=20, clients=4, seconds=1, mixed=4, crash=16, seed=0)
    printed = capsys.readouterr().out
    lines = dict(re.findall(r"^ *(engine|one client|4 clients|mixed|memory|killed|kept): (.*)$", printed, re.MULTILINE))
    assert len(lines) == 7, printed
    assert "error" not in printed
    assert "cut" in lines["killed"]  # the server was killed while clients waited
    counts = re.fullmatch(r"of (\d+) puts and (\d+) deletes that were acknowledged, 0 are lost", lines["kept"])
    assert counts is not None
    assert min(map(int, counts.groups())) > 0
