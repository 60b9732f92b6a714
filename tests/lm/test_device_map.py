"""An LM over several devices answers as on one. They are the CPU and the disk, and a GPU where there is one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from mac_rag import Document, MACEngine, MACModel
from mac_rag.config import BaseLMConfig, ModulationConfig, PromptFormat
from mac_rag.errors import ConfigError, MACError, ModelLoadError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.devices import DeviceMap, device_of
from mac_rag.lm.loading import load_causal_lm
from tests.helpers import Folder, built, mac_config, save_tokenizer, strong
from tests.lm.helpers import ARCHITECTURES, KINDS, QUESTIONS, TEXTS

CPU = torch.device("cpu")

LLAMA = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
         "model.norm": "disk", "lm_head": "cpu"}  # fmt: skip
GPT2 = {"transformer.wte": "cpu", "transformer.wpe": "disk", "transformer.drop": "cpu", "transformer.h.0": "disk",
        "transformer.h.1": "cpu", "transformer.ln_f": "cpu", "lm_head": "cpu"}  # fmt: skip
MAPS: dict[str, dict[str, Any]] = {"llama": LLAMA, "gpt2": GPT2}


@pytest.fixture(scope="module")
def checkpoint(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Folder of a checkpoint around a tiny LM, whose modulation of a kind changes what is generated."""
    root = tmp_path_factory.mktemp("checkpoints")

    def folder(name: str, kind: Any) -> Path:
        place = root / f"{name}-{kind}"
        if not place.exists():
            values: dict[str, Any] = {"memory_weight": 0.5, "max_new_tokens": 4}
            config = mac_config(model_folder(name), modulation=ModulationConfig(kind=kind), **values)
            strong(built(config)).save_pretrained(place)
        return place

    return folder


def answers(model: MACModel) -> list[Any]:
    """What a model says in each way of asking: greedy, streamed, an ensemble, alone, and its losses."""
    phi = model.aggregate(QUESTIONS, model.amortize(TEXTS))
    contexts = [TEXTS[:1], TEXTS]
    fitted = [model.fit_to_window(question, TEXTS[:1]) for question in QUESTIONS]
    losses = model.base_lm.answer_loss([[1, 30, 31], [1, 40]], [[60, 2], [61, 2]], model.modulation(phi))
    engine = MACEngine(model)
    engine.adapt([Document(str(i), text) for i, text in enumerate(TEXTS)])
    return [
        model.generate(QUESTIONS, modulation=phi),
        model.generate(QUESTIONS, contexts, modulation=phi),
        ["".join(model.stream(QUESTIONS[1], TEXTS, modulation=phi[1:]))],
        model.generate(fitted, modulation=phi, memory_weight=0.5),
        model.generate(QUESTIONS),
        [answer.text for answer in engine.answer(QUESTIONS)],
        [round(float(loss), 3) for loss in losses.detach()],
    ]


@pytest.mark.parametrize(("name", "kind"), [*(("llama", kind) for kind in KINDS), ("gpt2", "lora")])
def test_answers_are_those_of_one_device(checkpoint: Callable[..., Path], name: str, kind: str) -> None:
    folder = checkpoint(name, kind)
    plain = MACModel.from_pretrained(folder, device="cpu")
    spread = MACModel.from_pretrained(folder, device_map=MAPS[name])
    assert any(parameter.is_meta for parameter in spread.base_lm.model.parameters())
    assert spread.device == CPU
    assert spread.fingerprint == plain.fingerprint
    expected = answers(plain)
    assert answers(spread) == expected
    assert expected[0] != expected[4]  # the memory says something


def test_weights_that_loading_changes_wait_in_a_folder_of_the_lm(tmp_path: Path) -> None:
    """Files hold each expert by itself, and the LM has them in one tensor."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", **ARCHITECTURES["mixtral"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, "<s> $A")
    places = DeviceMap({**LLAMA, "model.layers.0": "disk"})
    plain, spread = (
        BaseLM.load(BaseLMConfig(name=str(tmp_path)), PromptFormat(), CPU, device_map=each) for each in (None, places)
    )
    rows, answer = [[1, 30, 31], [1, 40]], [[60, 2], [61, 2]]
    torch.testing.assert_close(spread.answer_loss(rows, answer, None), plain.answer_loss(rows, answer, None))
    folder = Path(spread.model.offload_folder.name)
    assert list(folder.iterdir())
    del spread
    gc.collect()
    assert not folder.exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("waiting", ["cpu", "disk"])
def test_a_gpu_and_what_waits_beside_it(checkpoint: Callable[..., Path], kind: str, waiting: str) -> None:
    places = {module: waiting if "layers.1" in module else 0 for module in LLAMA}
    spread = MACModel.from_pretrained(checkpoint("llama", kind), device_map=places)
    assert spread.device == torch.device("cuda", 0)
    assert {p.device for p in spread.mac_state().values()} == {spread.device}
    assert answers(spread) == answers(MACModel.from_pretrained(checkpoint("llama", kind), device="cuda"))


class OneDevice(TorchFunctionMode):
    """Fails where an operation has tensors of several devices; some are lenient towards `meta`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor) and part.ndim]
        moves = function is torch.Tensor.to
        assert moves or len({tensor.device for tensor in tensors}) < 2, f"{function} mixes devices"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_finds_its_part_of_the_memory_on_its_own_device(model_folder: Folder, kind: Any) -> None:
    """The second layer runs on `meta`, a device without values: whatever mixes devices in it is an error."""
    lm = BaseLM.load(BaseLMConfig(name=str(model_folder("llama"))), PromptFormat(), CPU)
    config = mac_config(model_folder("llama"), modulation=ModulationConfig(kind=kind))
    network = MACModel.from_config(config, device="cpu").modulation
    body = lm.model.model
    for module in (body.layers[1], body.norm):
        for part in module.modules():
            add_hook_to_module(part, AlignDevicesHook("meta"))
        module.to("meta")
    assert [device_of(layer).type for layer in body.layers] == ["cpu", "meta"]
    modulation = network(torch.randn(2, 4, lm.width))
    ids, mask, positions, _ = lm._padded([[1, 30, 31], [1, 40]], modulation)
    with modulation.attached(lm.model), OneDevice():
        output = body(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=lm._cache(modulation))
    assert output.last_hidden_state.is_meta


class TestRefusals:
    def test_training_and_storing_with_offloaded_weights(self, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
        model = MACModel.from_pretrained(checkpoint("llama", "prefix"), device_map=LLAMA)
        with pytest.raises(ConfigError, match=r"training needs all weights.*model\.layers\.1\.self_attn\.q_proj"):
            model.train()
        with pytest.raises(ConfigError, match="storing the LM in a checkpoint needs all weights"):
            model.save_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                {"device_map": {**LLAMA, "model.embed_tokens": "disk", "lm_head": "disk"}},
                "offloads the LM's embeddings",
            ),
            ({"device": "cpu", "device_map": "auto"}, "leave out one"),
            ({"max_memory": {"cpu": "1GiB"}}, "there is no device_map"),
            ({"device_map": "everywhere"}, "everywhere"),
            ({"device_map": {"": 77}}, r"device_map \{'': 77\}"),
        ],
    )
    def test_maps_that_cannot_be(self, checkpoint: Callable[..., Path], arguments: Any, message: str) -> None:
        with pytest.raises(MACError, match=message):
            MACModel.from_pretrained(checkpoint("llama", "prefix"), **arguments)

    def test_without_accelerate(self, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "accelerate", None)
        with pytest.raises(ModelLoadError, match=r"install mac-rag\[train\]"):
            MACModel.from_pretrained(checkpoint("llama", "prefix"), device_map="auto")

    @pytest.mark.parametrize("config", [BaseLMConfig(name="minilm"), BaseLMConfig(name=".", gguf_file="a.gguf")])
    def test_lms_that_go_to_one_device(self, config: BaseLMConfig) -> None:
        with pytest.raises(ModelLoadError, match="goes to one device; leave out device_map"):
            load_causal_lm(config, CPU, device_map=DeviceMap("auto"))


def test_auto_puts_a_small_lm_on_one_device_and_it_can_be_trained(checkpoint: Callable[..., Path]) -> None:
    model = MACModel.from_pretrained(checkpoint("llama", "prefix"), device_map="auto")
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model.train().training


def test_max_memory_limits_what_lies_on_a_device(checkpoint: Callable[..., Path]) -> None:
    """Of 405 kB only the embeddings and the first layer may stay; the others go to disk."""
    folder = checkpoint("llama", "prefix")
    model = MACModel.from_pretrained(folder, device_map="auto", max_memory={"cpu": 330_000})
    places = {name for name, parameter in model.base_lm.model.named_parameters() if parameter.is_meta}
    assert any("layers.1" in name for name in places)
    assert not any("layers.0" in name or "embed" in name for name in places)
    assert model.generate(QUESTIONS) == MACModel.from_pretrained(folder, device="cpu").generate(QUESTIONS)
