"""What `mac-rag serve` is told by command line, environment, file and deploy/; errors name the place, no secret."""

from __future__ import annotations

import re
import shlex
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mac_rag.cli.main import app
from mac_rag.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.yaml"


def settings(*arguments: str, **environment: str) -> dict[str, Any]:
    """What counts, as --print-config says."""
    done = CliRunner().invoke(app, ["serve", *arguments, "--print-config"], env=environment)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    printed = yaml.safe_load(done.stdout)
    assert isinstance(printed, dict)
    return printed


def refusal(file: Path, text: str) -> str:
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        settings("--config", str(file))
    assert str(error.value).startswith(str(file))
    return str(error.value)


@pytest.mark.parametrize(("on_line", "in_environment", "in_file"), list(product([False, True], repeat=3)))
def test_options_precede_variables_and_the_file(file: Path, on_line: bool, in_environment: bool, in_file: bool) -> None:
    file.write_text("port: 1\ndata: of-file\n" if in_file else "data: of-file")
    arguments = ["--port", "3"] if on_line else []
    environment = {"MAC_RAG_SERVE_PORT": "2"} if in_environment else {}
    expected = 3 if on_line else 2 if in_environment else 1 if in_file else 8080
    found = settings("--config", str(file), *arguments, **environment)
    assert (found["port"], found["data"]) == (expected, "of-file")


def test_the_environment_names_the_file_and_takes_every_option(file: Path) -> None:
    file.write_text("seconds: 5")
    values = {"data": "d", "model": "mac-tiny", "host": "::1", "port": 1, "model_name": "m", "no_keys": True,
              "pending": 2, "requests_per_minute": 3, "device_map": "auto",
              "allow_origin": "https://a.example"}  # fmt: skip
    variables = {f"MAC_RAG_SERVE_{name.upper()}": str(value) for name, value in values.items()}
    assert settings(**variables, MAC_RAG_SERVE_CONFIG=str(file)) == values | {"seconds": 5}


def test_what_is_printed_is_a_file_that_says_the_same(file: Path) -> None:
    once = settings("--data", "a: folder", "--seconds", "7", MAC_RAG_SERVE_NO_KEYS="1")
    file.write_text(CliRunner().invoke(app, ["serve", "--data", "a: folder", "--seconds", "7", "--print-config"],
                                       env={"MAC_RAG_SERVE_NO_KEYS": "1"}).stdout)  # fmt: skip
    assert "seconds: 7.0  # command line" in file.read_text()
    assert "no_keys: true  # environment" in file.read_text()
    assert settings("--config", str(file)) == once


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("requests-per-minute: 3", "'requests-per-minute' is no option of mac-rag serve; did you mean requests_per_m"),
        ("prot: 3", "did you mean port?; it takes data, model, host, port"),
        ("config: other.yaml", "'config' is no option"),
        ("1: 2", "'1' is no option"),
        ("port: true", "port takes a whole number, not True"),
        ("port: 8080.0", "port takes a whole number, not 8080.0"),
        ("port: 70000", "port: Input should be less than or equal to 65535 (got 70000)"),
        ("pending:", "pending takes a whole number, not None"),
        ("no_keys: 'yes'", "no_keys takes true or false, not 'yes'"),
        ("host: 127", "host takes a text, not 127"),
        ("model: [a]", "model takes a text, not ['a']"),
        ("port: 1\nport: 2", "the key 'port' comes twice, line 2, column 1"),
        ("- port", "holds no options"),
        ("", "holds no options"),
        ("port: [", "is not valid YAML"),
    ],
)
def test_a_file_that_says_something_else_is_refused(file: Path, text: str, message: str) -> None:
    assert message in refusal(file, text)


@pytest.mark.parametrize(
    "text", ["api_key: s3cret", "port: 1\nkey: s3cret: x", "port: {key: s3cret", "? [s3cret]\n: 1", "port: !s3 s3cret"]
)
def test_what_may_be_a_secret_is_not_repeated(file: Path, text: str) -> None:
    assert "s3cret" not in refusal(file, text)


def test_a_file_that_is_not_there_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.yaml cannot be read"):
        settings("--config", str(file))


def test_a_variable_that_is_none_is_refused_without_its_value() -> None:
    with pytest.raises(ConfigError, match="MAC_RAG_SERVE_PROT is no option of mac-rag serve; did you mean") as error:
        settings("--data", "d", MAC_RAG_SERVE_PROT="s3cret")
    assert "s3cret" not in str(error.value)
    with pytest.raises(ConfigError, match=r"MAC_RAG_SERVE_PORT: .* \(got '70000'\)"):
        settings("--data", "d", MAC_RAG_SERVE_PORT="70000")
    assert settings("--data", "d", MAC_RAG_SERVE_PORT="")["port"] == 8080


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
