"""Loading LMs and encoders: dtype, quantisation, GGUF files, weights stored as int8, and what is refused."""

from __future__ import annotations

import re
import struct
import sys
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mac_rag.config import BaseLMConfig, Dtype, EncoderConfig, MACConfig, ModulationConfig, PromptFormat
from mac_rag.errors import ConfigError, ModelLoadError, QuantizationError
from mac_rag.lm import base_lm, devices
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.devices import default_device
from mac_rag.lm.gguf_files import check_gguf, load_gguf
from mac_rag.lm.loading import INT8_LM, from_int8, load_backbone, load_causal_lm, require_gradients, to_int8
from mac_rag.lm.lora_tuning import make_trainable
from mac_rag.model import MACModel
from tests.helpers import VOCABULARY, Folder, built, mac_config, reloaded, save_tokenizer
from tests.lm.helpers import save_gguf
from tests.torture.mutations import copy

CPU = torch.device("cpu")


def test_pickled_weights_are_refused(model_folder: Folder, tmp_path: Path) -> None:
    place = copy(model_folder("gpt2"), tmp_path / "lm")
    torch.save(load_file(place / "model.safetensors"), place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):
        load_causal_lm(BaseLMConfig(name=str(place)), CPU)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_4_bit_lm_answers_on_the_cpu(model_folder: Folder, name: str) -> None:
    config = BaseLMConfig(name=str(model_folder(name)), quantization="nf4")
    plain = config.model_copy(update={"quantization": "none"})
    lm, whole = (BaseLM.load(each, PromptFormat(), CPU) for each in (config, plain))
    assert lm.model.is_quantized
    assert lm.generate([[1, 30, 31], [1, 40]], None, max_new_tokens=3)
    linears, expected = (each.shape(ModulationConfig(kind="lora")).linears.keys() for each in (lm, whole))
    assert linears >= expected


def test_a_4_bit_lm_may_have_a_width_of_no_whole_block(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": VOCABULARY}
    LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=96, **sizes)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, "$A")
    lm = BaseLM.load(BaseLMConfig(name=str(tmp_path), quantization="nf4"), PromptFormat(), CPU)
    assert len(lm.generate([[1, 30, 31]], None, max_new_tokens=2)) == 1


def test_quantising_t5_freezes_its_encoder_and_trains_its_decoder(model_folder: Folder) -> None:
    config = EncoderConfig(name=str(model_folder("t5")), quantization="nf4")
    backbone = load_backbone(config, CPU)
    trained = {name for name, p in backbone.named_parameters() if p.requires_grad}
    assert trained
    assert all(name.startswith("decoder.") for name in trained)
    kinds = {name: type(module).__name__ for name, module in backbone.named_modules()}
    assert kinds["encoder.block.0.layer.0.SelfAttention.q"] == "Linear4bit"
    assert kinds["decoder.block.0.layer.0.SelfAttention.q"] == "Linear"


def test_a_quantised_model_comes_back_from_its_checkpoint(model_folder: Folder, tmp_path: Path) -> None:
    config = mac_config(model_folder("llama"), model_folder("t5"), "encoder-decoder")
    part = config.amortization.model_copy(update={"quantization": "nf4"})
    model = built(config.model_copy(update={"amortization": part}))
    again = reloaded(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert not any("amortization.network.backbone.encoder" in name for name in stored)
    assert again.fingerprint == model.fingerprint
    torch.testing.assert_close(again.amortize(["A text.", "Another."]), model.amortize(["A text.", "Another."]))


def test_gradients_through_int8_weights_are_refused_on_the_cpu(model_folder: Folder) -> None:
    for quantization, device in (("none", "cpu"), ("nf4", "cpu"), ("nf4", "cuda"), ("int8", "cuda")):
        require_gradients(quantization, torch.device(device))  # type: ignore[arg-type]
    for quantization, device in (("int8", "cpu"), ("nf4", "mps")):
        with pytest.raises(QuantizationError, match=rf"{quantization}.*{device}"):
            require_gradients(quantization, torch.device(device))  # type: ignore[arg-type]
    lm, _ = load_causal_lm(BaseLMConfig(name=str(model_folder("llama")), quantization="nf4"), CPU)
    with pytest.raises(ConfigError, match="stays frozen"):
        make_trainable(lm, None)


def test_gradients_through_nf4_weights_are_those_of_the_same_weights_in_32_bit(model_folder: Folder) -> None:
    """QLoRA on a CPU, whose weights may be packed for answering when training begins."""
    lm, _ = load_causal_lm(BaseLMConfig(name=str(model_folder("llama")), quantization="nf4"), CPU)
    whole, ids = deepcopy(lm).dequantize(), torch.tensor([[1, 30, 31, 32]])
    with torch.no_grad():
        lm.eval()(input_ids=ids)  # packs the weights, if the CPU has instructions for it
    gradients = []
    for each in (lm, whole):
        torch.manual_seed(0)
        make_trainable(each, 2, merging=False)
        updates = {name: weight for name, weight in each.eval().named_parameters() if weight.requires_grad}
        for weight in updates.values():  # one of the two matrices starts at zero
            torch.nn.init.normal_(weight, std=0.1)
        each(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: weight.grad for name, weight in updates.items()})
    for name, expected in gradients[1].items():  # packing rounds the scales of the weights to bf16
        assert (gradients[0][name] - expected).abs().max() < 0.02 * expected.abs().max(), name


def test_lora_without_a_target(model_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_lm, "LORA_TARGETS", ("nothing",))
    config = mac_config(model_folder("llama"), modulation=ModulationConfig(kind="lora"))
    with pytest.raises(ModelLoadError, match=r"named nothing.*choose another modulation\.kind"):
        MACModel.from_config(config, device="cpu")


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_unknown_devices(device: str) -> None:
    with pytest.raises(ConfigError, match=device):
        default_device(device)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_numbers_without_instructions(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads an LM in them is told; fp32 has instructions everywhere, and a GPU has others."""
    for supported in (True, False):
        monkeypatch.setattr(devices, "_has_instructions", lambda _, supported=supported: supported)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for device in ("cpu", "meta"):
                devices.warn_of_slow_numbers("an-lm", dtype, torch.device(device))
        assert len(caught) == (dtype != "fp32" and not supported)
        assert not caught or re.match(r"an-lm is loaded in .*set dtype: fp32", str(caught[0].message))


@pytest.fixture(scope="module")
def gguf(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama as a GGUF file."""
    return save_gguf(model_folder("llama"), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def config_of(file: Path, **values: Any) -> BaseLMConfig:
    return BaseLMConfig(name=str(file.parent), gguf_file=file.name, **values)


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_weights_and_tokenizer_of_gguf_come_back(model_folder: Folder, gguf: Path, dtype: Any, expected: Any) -> None:
    lm, tokenizer = load_causal_lm(config_of(gguf, dtype=dtype), CPU)
    original = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=expected).state_dict()
    assert lm.state_dict().keys() == original.keys()
    assert all(torch.equal(tensor, original[name]) for name, tensor in lm.state_dict().items())
    theirs = AutoTokenizer.from_pretrained(model_folder("llama"))
    for text in ("A storm closed the port of Riga.", "Zürich 1934\n\n  – 640 horsepower"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab() == theirs.get_vocab()  # transformers would add GPT-2's <|endoftext|>
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)


def test_a_checkpoint_around_a_gguf_file_holds_a_plain_lm(model_folder: Folder, gguf: Path, tmp_path: Path) -> None:
    model = built(mac_config(model_folder("llama")).model_copy(update={"base_lm": config_of(gguf)}))
    again = reloaded(model, tmp_path / "mac")
    assert again.config.base_lm == BaseLMConfig(name="./base_lm")
    assert not getattr(again.base_lm.model, "is_quantized", False)
    assert not hasattr(again.base_lm.model.config, "quantization_config")
    assert again.fingerprint == model.fingerprint
    assert again.generate(["Which port?"]) == model.generate(["Which port?"])


class TestGGUFRefusals:
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

    def test_a_packaged_lm_and_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match="leave out gguf_file"):
            load_causal_lm(BaseLMConfig(name="minilm", gguf_file="a.gguf"), CPU)
        with pytest.raises(ModelLoadError, match=r"there is no tiny\.gguf in"):
            load_causal_lm(config_of(tmp_path / "tiny.gguf"), CPU)

    @pytest.mark.parametrize("package", ["gguf", "accelerate"])
    def test_a_missing_package(self, gguf: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ModelLoadError, match=rf"{package}.*install mac-rag\[gguf\]"):
            load_causal_lm(config_of(gguf), CPU)


class TestBadGGUFFiles:
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

    @pytest.mark.parametrize(
        ("header", "message"),
        [
            ({"tensors": 2**62}, "more than it has room for"),
            ({"pairs": 2**62}, "more than it has room for"),
            *(
                ({"raw": (b"tokens", struct.pack("<IIQ", 9, kind, 2**60))}, "more than it has room for")
                for kind in (0, 4, 8)
            ),
            (
                {"raw": (b"tokens", struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 20000)},
                "type 9, which cannot be read",
            ),
            ({"values": {"llama.block_count": 10**9}}, f"announces {10**9} layers"),
            ({"values": {"llama.block_count": 2000}}, "announces 2000 layers"),
            ({"architecture": "unheard-of"}, r"cannot read a configuration from .*tiny\.gguf"),
            (
                {"architecture": "mamba", "values": {"mamba.block_count": 2}},
                "mamba keeps its state in a cache of its own",
            ),
        ],
        ids="tensors pairs array-0 array-4 array-8 nested layers more-layers unknown unfit".split(),
    )
    def test_headers_that_announce_what_cannot_be(self, tmp_path: Path, header: Any, message: str) -> None:
        with pytest.raises(ModelLoadError, match=message):
            load_causal_lm(config_of(save_header(tmp_path, **header)), CPU, modulation="lora")

    @pytest.mark.parametrize("key", ["embedding_length", "feed_forward_length", "vocab_size", "rope.dimension_count"])
    def test_a_model_larger_than_its_file(self, model_folder: Folder, tmp_path: Path, key: str) -> None:
        file = save_gguf(model_folder("llama"), tmp_path / "large.gguf", **{f"llama.{key}": 2**31 - 64})
        with pytest.raises(ModelLoadError, match=r"describes an LM of|cannot read a causal LM"):
            load_causal_lm(config_of(file), CPU)

    def test_missing_weights(self, model_folder: Folder, tmp_path: Path) -> None:
        file = save_gguf(model_folder("llama"), tmp_path / "part.gguf", without=("blk.1.attn_q.weight",))
        with pytest.raises(ModelLoadError, match=r"lacks 1 of the LM's weights.*layers\.1\.self_attn\.q_proj"):
            load_gguf(str(tmp_path), file.name, None, dtype=torch.float32)


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


@given(arrays("float32", st.tuples(st.integers(1, 4), st.integers(1, 5)), elements=st.floats(-1e3, 1e3, width=32)))
def test_no_weight_is_further_off_than_half_a_step_of_its_row_or_column(rows) -> None:  # type: ignore[no-untyped-def]
    weights = torch.from_numpy(rows)
    stored = to_int8({"w": weights})
    assert stored["w"].dtype == torch.int8
    off = (from_int8(stored)["w"] - weights).abs()
    steps = [weights.abs().amax(dim, keepdim=True) / 127 for dim in (-1, -2)]
    assert any((off <= 0.501 * step + 1e-37).all() for step in steps)
    by_rows = (weights / steps[0].clamp(min=1e-37)).round() * steps[0] - weights
    assert off.square().sum() <= by_rows.square().sum() * 1.001 + 1e-30


def test_a_large_column_does_not_take_the_others_precision() -> None:
    torch.manual_seed(0)
    weights = torch.randn(2, 40, 30)
    weights[..., 7] = 1000.0
    back = from_int8(to_int8({"w": weights}))["w"]
    assert torch.allclose(back, weights, atol=0.02)
    turned = from_int8(to_int8({"w": weights.mT}))["w"]
    assert torch.allclose(turned, weights.mT, atol=0.02)


def test_vectors_and_whole_numbers_stay_as_they_are() -> None:
    state = {"bias": torch.randn(5), "ids": torch.arange(6).view(2, 3), "zeros": torch.zeros(2, 3)}
    back = from_int8(to_int8(state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_a_checkpoint_of_int8_is_a_quarter_and_answers_as_before(model_folder: Folder, tmp_path: Path) -> None:
    model = built(mac_config(model_folder("llama")))
    model.save_pretrained(tmp_path / "fp32")
    model.save_pretrained(tmp_path / "int8", dtype=torch.int8)
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).rglob("*.safetensors")) for name in ("fp32", "int8")]
    assert sizes[1] < 0.35 * sizes[0]
    rounded = MACModel.from_pretrained(tmp_path / "int8", device="cpu")
    texts = ["The mayor of Lisbon opened a bridge.", "A storm closed the port of Riga on Monday."]
    before, after = model.amortize(texts), rounded.amortize(texts)
    assert (before - after).norm() < 0.05 * before.norm()
    prompt = torch.tensor([[1, 40, 41, 42]])
    with torch.no_grad():
        logits = [m.base_lm.model(prompt).logits for m in (model, rounded)]
    assert (logits[0] - logits[1]).norm() < 0.05 * logits[0].norm()
    # Rounding what is already rounded changes nothing.
    again = reloaded(rounded, tmp_path / "again", dtype=torch.int8)
    assert torch.allclose(again.amortize(texts), after, atol=1e-5)


def test_a_base_lm_of_int8_that_does_not_fit_is_refused(model_folder: Folder, tmp_path: Path) -> None:
    MACModel.from_config(mac_config(model_folder("gpt2")), device="cpu").save_pretrained(tmp_path, dtype=torch.int8)
    place = tmp_path / "base_lm"
    lm, _ = load_causal_lm(BaseLMConfig(name=str(place)), CPU)
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    with pytest.raises(ModelLoadError, match="cannot be quantised again"):
        load_causal_lm(BaseLMConfig(name=str(place), quantization="nf4"), CPU)
    stored = load_file(place / INT8_LM)
    del stored["transformer.wpe.weight"]
    save_file(stored, place / INT8_LM)
    with pytest.raises(ModelLoadError, match=r"does not match config.json: transformer.wpe.weight"):
        load_causal_lm(BaseLMConfig(name=str(place)), CPU)
