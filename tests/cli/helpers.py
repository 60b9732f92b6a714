"""The command `mac-rag`, run in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from mac_rag.cli.main import app
from mac_rag.errors import MACError


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    """The message of the error that the command's user would see."""
    result = run(*arguments)
    assert isinstance(result.exception, MACError), result.output
    return str(result.exception)
