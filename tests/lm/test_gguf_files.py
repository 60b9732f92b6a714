"""GGUF files: their weights and tokenizer are those that were written, and a bad file is an error at once."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from mac_rag.config import BaseLMConfig, MACConfig
from mac_rag.errors import ConfigError, ModelLoadError
from mac_rag.lm.gguf_files import check_gguf, load_gguf
from mac_rag.lm.loading import load_causal_lm
from mac_rag.model import MACModel
from tests.helpers import mac_config
from tests.lm.helpers import save_gguf

Folder = Callable[[str], Path]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def gguf(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama as a GGUF file."""
    return save_gguf(model_folder("llama"), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def config_of(file: Path, **values: Any) -> BaseLMConfig:
    return BaseLMConfig(name=str(file.parent), gguf_file=file.name, **values)


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_weights_and_tokenizer_are_those_that_were_written(
    model_folder: Folder, gguf: Path, dtype: Any, expected: torch.dtype
) -> None:
    lm, tokenizer = load_causal_lm(config_of(gguf, dtype=dtype), CPU)
    original = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=expected).state_dict()
    assert lm.state_dict().keys() == original.keys()
    assert all(torch.equal(tensor, original[name]) for name, tensor in lm.state_dict().items())
    theirs = AutoTokenizer.from_pretrained(model_folder("llama"))
    for text in ("A storm closed the port of Riga.", "Zürich 1934\n\n  – 640 horsepower"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)


def test_a_checkpoint_around_a_gguf_file_holds_a_plain_lm(model_folder: Folder, gguf: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = mac_config(model_folder("llama")).model_copy(update={"base_lm": config_of(gguf)})
    model = MACModel.from_config(config, device="cpu")
    model.save_pretrained(tmp_path / "mac")
    again = MACModel.from_pretrained(tmp_path / "mac", device="cpu")
    assert again.config.base_lm == BaseLMConfig(name="./base_lm")
    assert not getattr(again.base_lm.model, "is_quantized", False)
    assert not hasattr(again.base_lm.model.config, "quantization_config")
    assert again.fingerprint == model.fingerprint
    assert again.generate(["Which port?"]) == model.generate(["Which port?"])


class TestRefusals:
    def test_a_second_quantisation(self, gguf: Path) -> None:
        with pytest.raises(ConfigError, match=r"tiny\.gguf is dequantised; set quantization: none"):
            MACConfig.parse(
                mac_config(gguf.parent).model_dump()
                | {"base_lm": {"name": str(gguf.parent), "gguf_file": gguf.name, "quantization": "nf4"}},
                "test",
            )

    @pytest.mark.parametrize("file", ["../tiny.gguf", "/tiny.gguf", "a/../../tiny.gguf", "model.safetensors"])
    def test_a_file_outside_of_the_folder_or_of_another_kind(self, file: str) -> None:
        with pytest.raises(ValueError, match=r"give the path of a \.gguf file inside"):
            BaseLMConfig(name="folder", gguf_file=file)

    def test_a_packaged_lm(self) -> None:
        with pytest.raises(ModelLoadError, match="leave out gguf_file"):
            load_causal_lm(BaseLMConfig(name="minilm", gguf_file="a.gguf"), CPU)

    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"there is no tiny\.gguf in"):
            load_causal_lm(config_of(tmp_path / "tiny.gguf"), CPU)

    @pytest.mark.parametrize("package", ["gguf", "accelerate"])
    def test_a_missing_package(self, gguf: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ModelLoadError, match=rf"{package}.*install mac-rag\[gguf\]"):
            load_causal_lm(config_of(gguf), CPU)

    def test_an_lm_that_cannot_carry_the_modulation_before_its_weights_are_loaded(self, tmp_path: Path) -> None:
        file = save_header(tmp_path, architecture="mamba", values={"mamba.block_count": 2})
        with pytest.raises(ModelLoadError, match="mamba keeps its state in a cache of its own"):
            load_causal_lm(config_of(file), CPU, modulation="lora")


class TestBadFiles:
    """Every one is refused, at once, by an error that names the file."""

    @pytest.mark.parametrize(
        "content", [b"", b"GGUF", b"not a model at all", b"GGUF" + struct.pack("<I", 1) + b"\0" * 40]
    )
    def test_no_gguf_file(self, tmp_path: Path, content: bytes) -> None:
        file = tmp_path / "bad.gguf"
        file.write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"bad\.gguf is no complete GGUF file"):
            load_causal_lm(config_of(file), CPU)

    @settings(max_examples=40)
    @given(st.data())
    def test_a_file_that_is_cut_off(self, gguf: Path, data: st.DataObject) -> None:
        whole = gguf.read_bytes()
        end = data.draw(st.integers(0, len(whole) - 64))  # the last bytes may be padding
        cut = gguf.with_name("cut.gguf")
        cut.write_bytes(whole[:end])
        with pytest.raises(ModelLoadError, match="no complete GGUF file"):
            check_gguf(cut)

    @settings(max_examples=200)
    @given(st.integers(0, 4000), st.binary(min_size=1, max_size=8))
    def test_changed_bytes_in_its_header_are_harmless_or_refused(self, gguf: Path, place: int, change: bytes) -> None:
        changed = bytearray(gguf.read_bytes())
        changed[place : place + len(change)] = change
        bad = gguf.with_name("changed.gguf")
        bad.write_bytes(changed)
        try:
            content = check_gguf(bad)
        except ModelLoadError:
            return
        assert content.elements <= 8 * bad.stat().st_size  # the densest type has 5 numbers in a byte
        assert content.layers <= 1024

    @pytest.mark.parametrize("announced", [{"tensors": 2**62}, {"pairs": 2**62}])
    def test_counts_beyond_the_file(self, tmp_path: Path, announced: dict[str, int]) -> None:
        with pytest.raises(ModelLoadError, match="more than it has room for"):
            check_gguf(save_header(tmp_path, **announced))

    @pytest.mark.parametrize("kind", [0, 4, 8])
    def test_an_array_beyond_the_file(self, tmp_path: Path, kind: int) -> None:
        array = struct.pack("<IIQ", 9, kind, 2**60)
        with pytest.raises(ModelLoadError, match="more than it has room for"):
            check_gguf(save_header(tmp_path, raw=(b"tokens", array)))

    def test_an_array_of_arrays(self, tmp_path: Path) -> None:
        nested = struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 20000
        with pytest.raises(ModelLoadError, match="type 9, which cannot be read"):
            check_gguf(save_header(tmp_path, raw=(b"tokens", nested)))

    @pytest.mark.parametrize("layers", [10**9, 2000])
    def test_layers_without_end(self, tmp_path: Path, layers: int) -> None:
        with pytest.raises(ModelLoadError, match=f"announces {layers} layers"):
            check_gguf(save_header(tmp_path, values={"llama.block_count": layers}))

    @pytest.mark.parametrize("key", ["embedding_length", "feed_forward_length", "vocab_size", "rope.dimension_count"])
    def test_a_model_larger_than_its_file(self, model_folder: Folder, tmp_path: Path, key: str) -> None:
        file = save_gguf(model_folder("llama"), tmp_path / "large.gguf", **{f"llama.{key}": 2**31 - 64})
        with pytest.raises(ModelLoadError, match=r"describes an LM of|cannot read a causal LM"):
            load_causal_lm(config_of(file), CPU)

    def test_missing_weights(self, model_folder: Folder, tmp_path: Path) -> None:
        file = save_gguf(model_folder("llama"), tmp_path / "part.gguf", without=("blk.1.attn_q.weight",))
        with pytest.raises(ModelLoadError, match=r"lacks 1 of the LM's weights.*layers\.1\.self_attn\.q_proj"):
            load_gguf(str(tmp_path), file.name, None, dtype=torch.float32)

    def test_an_unknown_architecture(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"cannot read a configuration from .*tiny\.gguf"):
            load_causal_lm(config_of(save_header(tmp_path, architecture="unheard-of")), CPU)


def save_header(
    folder: Path,
    *,
    architecture: str = "llama",
    values: dict[str, int] | None = None,
    raw: tuple[bytes, bytes] | None = None,
    tensors: int = 0,
    pairs: int | None = None,
) -> Path:
    """A GGUF file of metadata alone; `raw` is a key and the bytes of its value, as hostile as you like."""

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    entries = [text(b"general.architecture") + struct.pack("<I", 8) + text(architecture.encode())]
    entries += [text(key.encode()) + struct.pack("<II", 4, value) for key, value in (values or {}).items()]
    entries += [] if raw is None else [text(raw[0]) + raw[1]]
    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(entries) if pairs is None else pairs)
    file = folder / "tiny.gguf"
    file.write_bytes(head + b"".join(entries) + b"\0" * 64)
    return file
