"""Folders of models that nobody vouches for: their code is never run, and what they describe is not believed."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mac_rag.config import BaseLMConfig, EncoderConfig
from mac_rag.errors import ModelLoadError
from mac_rag.lm import model_folders
from mac_rag.lm.loading import load_backbone, load_causal_lm, load_tokenizer
from mac_rag.lm.model_folders import AllocationLimit
from mac_rag.retrieval.encoders import SentenceTransformerEncoder, contriever
from tests.helpers import save_bert, save_llama
from tests.torture.mutations import copy

CPU = torch.device("cpu")
CODE = "from pathlib import Path\nPath(__file__).with_name('was-run').touch()\n"
USES = {
    "causal LM": lambda place: load_causal_lm(BaseLMConfig(name=place), CPU),
    "backbone": lambda place: load_backbone(EncoderConfig(name=place, design="encoder-only"), CPU),
    "tokenizer": load_tokenizer,
    "retrieval encoder": contriever,
    "sentence-transformers": SentenceTransformerEncoder,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def rewrite(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("known", [True, False], ids=["known architecture", "unknown architecture"])
@pytest.mark.parametrize("use", USES)
def test_code_of_a_folder_is_never_run_and_nobody_is_asked(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str, known: bool, file: str
) -> None:
    folder = copy(llama, tmp_path / "model")
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
    auto_map: dict[str, Any] = {**dict.fromkeys(names, "own.Own"), "AutoTokenizer": ["own.Own", "own.Own"]}
    rewrite(folder / file, auto_map=auto_map, **({} if known or file != "config.json" else {"model_type": "own"}))
    (folder / "own.py").write_text(CODE)
    answers = io.StringIO("y\n" * 20)
    monkeypatch.setattr(sys, "stdin", answers)
    with pytest.raises(ModelLoadError, match=rf"{file} has an auto_map, .* is never run"):
        USES[use](str(folder))
    assert not (folder / "was-run").exists()
    assert answers.tell() == 0


def test_what_a_configuration_names_or_describes_beyond_its_weights_is_refused(llama: Path, tmp_path: Path) -> None:
    for values, message in (
        ({"text_config": {"auto_map": {"AutoModel": "own.Own"}}}, "auto_map"),
        ({"attn_implementation": "someone/kernel"}, "a kernel from the Hub"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers"),
        ({"num_hidden_layers": 3}, r"lacks \d+ of the LM's weights, such as model.layers.2"),
        ({"hidden_size": 10**12}, None),
        ({"vocab_size": 10**9}, "describes a model of"),
        ({"transformers_weights": "../other.safetensors"}, "which is no file beside it"),
    ):
        folder = copy(llama, tmp_path / "model")
        rewrite(folder / "config.json", **values)
        with pytest.raises(ModelLoadError, match=message):
            load_causal_lm(BaseLMConfig(name=str(folder)), CPU)


def test_modules_of_sentence_transformers_are_its_own(tmp_path: Path) -> None:
    folder = save_bert(tmp_path / "model")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "own.Own"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelLoadError, match=r"modules.json names the module 'own.Own'"):
        SentenceTransformerEncoder(str(folder))


@pytest.mark.parametrize("use", USES)
def test_an_adapter_does_not_put_another_model_in_its_place(llama: Path, tmp_path: Path, use: str) -> None:
    folder = copy(llama, tmp_path / "model")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(llama)}))
    (folder / "config.json").unlink()  # else transformers takes the folder itself
    with pytest.raises(ModelLoadError, match=r"adapter_config.json makes this an adapter .* merge"):
        USES[use](str(folder))


def pretend_weights(path: Path, count: int) -> None:
    """A file of weights of one tensor of zeros, which takes no place on the disk."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + count)


def shard(folder: Path) -> Path:
    """Moves the weights of a model to a shard; returns the index that names it."""
    weights = load_file(folder / "model.safetensors")
    file = (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, file.name)}))
    return index


def test_only_weights_that_are_loaded_count(llama: Path, tmp_path: Path) -> None:
    large = 100_000_000  # numbers of weights; a 16th of it would do for the model that is described
    for kind in ("one file", "shards", "transformers_weights"):
        folder = copy(llama, tmp_path / "model")
        rewrite(folder / "config.json", vocab_size=2_000_000)
        if kind == "shards":
            shard(folder)
        elif kind == "transformers_weights":
            (folder / "model.safetensors").rename(folder / "own.safetensors")
            rewrite(folder / "config.json", transformers_weights="own.safetensors")
            pretend_weights(folder / "model.safetensors", large)
        pretend_weights(folder / "unused.safetensors", large)
        with pytest.raises(ModelLoadError, match="describes a model of"):
            load_causal_lm(BaseLMConfig(name=str(folder)), CPU)


def test_a_shard_that_is_missing_or_lies_elsewhere_is_named(llama: Path, tmp_path: Path) -> None:
    folder = copy(llama, tmp_path / "model")
    index = shard(folder)
    load_causal_lm(BaseLMConfig(name=str(folder)), CPU)
    rewrite(index, weight_map={"a": "model-00002-of-00002.safetensors"})
    for content, message in (
        (index.read_text(), r"weights lie in 'model-00002-of-00002.safetensors', .* download the model again"),
        ('{"weight_map": {"a": "../../other.safetensors"}}', "which is no file beside it"),
        ("{}", "names no files of weights"),
    ):
        index.write_text(content)
        with pytest.raises(ModelLoadError, match=message):
            load_causal_lm(BaseLMConfig(name=str(folder)), CPU)


def test_a_pipe_among_the_files_is_not_waited_for(llama: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        folder = copy(llama, tmp_path / "model")
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(ModelLoadError, match=f"{name} is damaged: it is a named pipe"):
            load_causal_lm(BaseLMConfig(name=str(folder)), CPU)


def test_an_allocation_is_refused_before_it_is_made() -> None:
    with AllocationLimit(1_000, "config.json"):
        torch.nn.Linear(10, 50)
        with pytest.raises(ModelLoadError, match=r"config\.json describes networks of more than 1,000 numbers"):
            torch.nn.Linear(10**9, 10**9)
    with AllocationLimit(1_000, "config.json"), pytest.raises(ModelLoadError):
        torch.arange(10**15)


class TestRevisions:
    COMMIT = "0123456789" * 4

    @pytest.fixture
    def hub(self, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """A repository that lies in the Hub's cache."""
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        repository = tmp_path / "models--someone--llama"
        copy(llama, repository / "snapshots" / self.COMMIT)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(self.COMMIT)
        monkeypatch.setattr(model_folders, "_pinned", model_folders._pinned.__wrapped__)
        return "someone/llama"

    def test_the_commit_is_told_where_none_was_chosen(self, hub: str) -> None:
        with pytest.warns(UserWarning, match=f"no revision was given for {hub}, so commit {self.COMMIT} is used"):
            assert model_folders.pinned(hub, None) == self.COMMIT

    def test_a_chosen_revision_is_no_surprise(self, hub: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert model_folders.pinned(hub, "main") == self.COMMIT
            assert model_folders.pinned(hub, self.COMMIT) == self.COMMIT
            assert model_folders.split_revision(f"{hub}@{self.COMMIT}") == (hub, self.COMMIT)

    def test_a_folder_and_an_unknown_name_stay_as_they_are(self, llama: Path) -> None:
        assert model_folders.pinned(str(llama), None) is None
        assert model_folders.pinned("someone/unknown", None) is None

    @pytest.mark.parametrize("whole", [True, False], ids=["model and adapter", "adapter alone"])
    def test_an_adapter_in_the_cache_is_refused(self, hub: str, tmp_path: Path, whole: bool) -> None:
        configuration = next(tmp_path.rglob("config.json"))
        (configuration.parent / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/other"}')
        if not whole:
            configuration.unlink()
        with pytest.raises(ModelLoadError, match=r"adapter_config.json makes this an adapter"):
            load_causal_lm(BaseLMConfig(name=hub, revision="main"), CPU)

    @pytest.mark.parametrize("file", ["adapter_config.json", "config.json"])
    def test_parts_of_a_sentence_encoder_in_the_cache_are_checked(self, hub: str, tmp_path: Path, file: str) -> None:
        snapshot = next(tmp_path.rglob("config.json")).parent
        module = {"idx": 0, "name": "0", "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}
        (snapshot / "modules.json").write_text(json.dumps([module]))
        (snapshot / "0_Transformer").mkdir()
        (snapshot / "0_Transformer" / file).write_text('{"auto_map": {"AutoModel": "own.Own"}}')
        with pytest.raises(ModelLoadError, match=f"0_Transformer/{file}"):
            SentenceTransformerEncoder(f"{hub}@main")

    @pytest.mark.parametrize("use", ["causal LM", "backbone", "retrieval encoder"])
    @pytest.mark.parametrize("sharded", [False, True])
    def test_a_description_is_held_against_the_weights(self, hub: str, tmp_path: Path, use: str, sharded: bool) -> None:
        configuration = next(tmp_path.rglob("config.json"))
        if sharded:
            shard(configuration.parent)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            USES[use](hub)
            rewrite(configuration, vocab_size=10**9)
            with pytest.raises(ModelLoadError, match=f"{hub} describes a model of"):
                USES[use](hub)

    def test_code_in_the_cache_is_refused(self, hub: str, tmp_path: Path) -> None:
        rewrite(next(tmp_path.rglob("config.json")), auto_map={"AutoModel": "own.Own"})
        with pytest.raises(ModelLoadError, match="auto_map"):
            model_folders.pinned(hub, "main")


def test_every_loader_of_transformers_is_told_not_to_trust() -> None:
    """Auto classes ask on standard input where they are not told."""
    root = Path(__file__).parents[2]
    untold = []
    parts = ("mac_rag", "pipelines", "eval", "benchmarks")
    for file in (path for part in parts for path in (root / part).rglob("*.py")):
        source = file.read_text()
        for node in ast.walk(ast.parse(source)) if "Auto" in source else ():
            if isinstance(node, ast.Call) and re.search(r"Auto\w+\.from_(pretrained|config)$", ast.unparse(node.func)):
                trusts = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}.get("trust_remote_code")
                if trusts not in ("False", "trust_remote_code"):
                    untold.append(f"{file.relative_to(root)}:{node.lineno}")
    assert not untold
