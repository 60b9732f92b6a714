"""The Ray cluster that distributed work runs on."""

from __future__ import annotations

import sys

import pytest

from mac_rag.distributed.cluster import connected_ray
from mac_rag.errors import ConfigError


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'mac-rag\[ray\]'"):
        connected_ray()
