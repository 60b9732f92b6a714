"""What deploy/ holds fits the server: its options are options, its extras are extras, and no option is forgotten."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mac_rag.cli.main import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_file_of_options_is_one() -> None:
    done = CliRunner().invoke(app, ["serve", "--config", str(DEPLOY / "server.yaml"), "--print-config"])
    assert done.exit_code == 0, done.output
    written = yaml.safe_load((DEPLOY / "server.yaml").read_text())
    counts = yaml.safe_load(done.stdout)
    assert {name: counts[name] for name in written} == written


def test_the_unit_starts_the_server_with_that_file_where_it_may_write() -> None:
    lines = [line for line in (DEPLOY / "mac-rag.service").read_text().splitlines() if not line.startswith("#")]
    unit = dict(line.split("=", 1) for line in lines if "=" in line)
    _, *arguments = shlex.split(unit["ExecStart"])
    assert arguments == ["serve", "--config", "/etc/mac-rag/server.yaml"]
    data = yaml.safe_load((DEPLOY / "server.yaml").read_text())["data"]
    assert data == f"/var/lib/{unit['StateDirectory']}"
    assert (unit["ProtectSystem"], unit["StateDirectoryMode"], unit["UMask"]) == ("strict", "0700", "0077")
    assert int(unit["TimeoutStopSec"]) > 90  # of mac_rag.server.app


def test_the_containers_variables_are_options() -> None:
    variables = dict(re.findall(r"(MAC_RAG_SERVE_\w+)=(\S+)", CONTAINERFILE))
    assert variables == {"MAC_RAG_SERVE_DATA": "/data", "MAC_RAG_SERVE_HOST": "0.0.0.0"}
    done = CliRunner().invoke(app, ["serve", "--print-config"], env=variables)
    assert done.exit_code == 0, done.output


def test_the_container_has_what_the_server_needs_and_no_rights() -> None:
    [extras] = re.findall(r"'\.\[([\w,]+)\]'", CONTAINERFILE)
    assert set(extras.split(",")) == {"server", "files"}
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    [oldest] = re.findall(r">=3\.(\d+)", PROJECT["requires-python"])
    assert {int(minor) >= int(oldest) for minor in re.findall(r"python:3\.(\d+)-slim", CONTAINERFILE)} == {True}
    last_stage = CONTAINERFILE.rpartition("\nFROM ")[2]
    assert re.search(
        r"^USER [1-9]\d*$", last_stage, re.MULTILINE
    )  # a number, so that a cluster can tell it is not root
    assert re.search(r"^HEALTHCHECK ", last_stage, re.MULTILINE)


def test_the_build_gets_every_package_of_the_wheel() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["mac_rag"]
    for folder in wheel["packages"]:
        assert f"\nCOPY {folder} {folder}\n" in CONTAINERFILE
        assert f"!{folder}" in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_health_check_asks_the_port_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import json
    import urllib.request

    [command] = re.findall(r"HEALTHCHECK .*\\\n    CMD (\[.*\])$", CONTAINERFILE, re.MULTILINE)
    asked: list[str] = []
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: asked.append(url))
    python, option, code = json.loads(command)
    assert (python, option) == ("python", "-c")
    exec(code, {})
    monkeypatch.setenv("MAC_RAG_SERVE_PORT", "9000")
    exec(code, {})
    assert asked == ["http://127.0.0.1:8080/ready", "http://127.0.0.1:9000/ready"]
