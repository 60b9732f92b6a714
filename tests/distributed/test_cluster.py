"""The Ray cluster that distributed work runs on."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mac_rag.distributed.cluster import connected_ray
from mac_rag.errors import ConfigError


def test_a_cluster_is_not_joined_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reaches a cluster without tokens runs code on it, so that must be said."""
    asked: list[str] = []

    def init(address: str, **_: Any) -> None:
        asked.append(address)

    fake = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.7:6379")
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=192\.0\.2\.7:6379 names no token.*RAY_AUTH_TOKEN"):
        connected_ray()
    assert not asked
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a token")
    connected_ray()
    assert asked == ["192.0.2.7:6379"]


@pytest.mark.slow
def test_ray_starts_again_in_a_process_that_has_stopped_it() -> None:
    for _ in range(2):
        ray = connected_ray()
        assert ray.get(ray.put("a value")) == "a value"
        ray.shutdown()
