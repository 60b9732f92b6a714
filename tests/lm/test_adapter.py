"""Adapters without PEFT do to an LM what PEFT does, and PEFT reads what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from mac_rag.config import BaseLMConfig, Quantization
from mac_rag.errors import ModelLoadError
from mac_rag.lm.adapter import Adapter
from mac_rag.lm.loading import load_causal_lm
from tests.helpers import Folder

IDS = torch.tensor([[5, 9, 33, 7, 60, 12]])


def loaded(folder: Path, quantization: Quantization = "none") -> Any:
    config = BaseLMConfig(name=str(folder), dtype="fp32", quantization=quantization)
    return load_causal_lm(config, torch.device("cpu"))[0].requires_grad_(False).eval()


def logits(lm: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = lm(input_ids=IDS).logits
    return result


def trained(folder: Path, saved: Path, **options: Any) -> Path:
    """The folder of an adapter that changes the LM."""
    adapted = get_peft_model(loaded(folder), LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", **options))
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(saved)
    return saved


@pytest.mark.parametrize(("name", "quantization"), [("llama", "none"), ("gpt2", "none"), ("llama", "nf4")])
def test_an_lm_answers_as_with_peft(
    model_folder: Folder, tmp_path: Path, name: str, quantization: Quantization
) -> None:
    folder = trained(model_folder(name), tmp_path / "trained")
    plain, adapted = (loaded(model_folder(name), quantization) for _ in range(2))
    written = Adapter.add(folder, adapted)
    written.write(tmp_path / "written")
    assert (logits(adapted) - logits(plain)).abs().max() > 0.1
    for place in (folder, tmp_path / "written"):
        by_peft = PeftModel.from_pretrained(loaded(model_folder(name), quantization), str(place))
        torch.testing.assert_close(logits(adapted), logits(by_peft), rtol=0, atol=2e-5)


def test_what_is_written_is_rounded_to_the_lm_and_names_no_place(model_folder: Folder, tmp_path: Path) -> None:
    folder = trained(model_folder("llama"), tmp_path / "trained")
    lm = loaded(model_folder("llama")).bfloat16()
    adapter = Adapter.add(folder, lm)
    adapter.write(tmp_path / "written")
    assert {tensor.dtype for tensor in load_file(tmp_path / "written" / "adapter_model.safetensors").values()} == {
        torch.bfloat16
    }
    assert str(model_folder("llama")) in (folder / "adapter_config.json").read_text()
    assert "/" not in (tmp_path / "written" / "adapter_config.json").read_text()
    again = loaded(model_folder("llama")).bfloat16()
    assert Adapter.add(tmp_path / "written", again).digest == adapter.digest
    assert torch.equal(logits(again), logits(lm))


def test_the_digest_tells_adapters_apart(model_folder: Folder, tmp_path: Path) -> None:
    folder = trained(model_folder("llama"), tmp_path / "trained")
    digests = {Adapter.add(folder, loaded(model_folder("llama"))).digest}
    told = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**told, "lora_alpha": 7}))
    digests.add(Adapter.add(folder, loaded(model_folder("llama"))).digest)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({name: -tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    digests.add(Adapter.add(folder, loaded(model_folder("llama"))).digest)
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("told", "renamed", "cut", "message"),
    [
        ({"peft_type": "LOHA"}, None, None, "of another kind"),
        ({"use_dora": True}, None, None, "of another kind"),
        ({"use_rslora": True}, None, None, "of another kind"),
        ({"alpha_pattern": {"q_proj": 3}}, None, None, "of another kind"),
        ({}, (".lora_B.weight", ".bias"), None, "of another kind"),
        ({}, ("layers.1.", "layers.7."), None, r"the LM has no layer model\.layers\.7\."),
        ({}, ("self_attn.q_proj", "input_layernorm"), None, r"the LM has no layer .*input_layernorm"),
        ({}, None, "lora_B", r"down_proj maps \d+ numbers to \d+, its update \[4, \d+\] to \[1, 4\]"),
        ({"r": 10**9}, None, None, r"rank is said to be 1000000000, and its updates have \[4\]"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    model_folder: Folder, tmp_path: Path, told: dict[str, Any], renamed: Any, cut: str | None, message: str
) -> None:
    folder = trained(model_folder("llama"), tmp_path / "trained")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **told}))
    tensors = load_file(folder / "adapter_model.safetensors")
    if renamed is not None:
        tensors = {name.replace(*renamed): tensor for name, tensor in tensors.items()}
    if cut is not None:
        tensors = {name: tensor[:1].clone() if cut in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    lm = loaded(model_folder("llama"))
    before = logits(lm)
    with pytest.raises(ModelLoadError, match=f"trained holds no adapter of this LM: .*{message}"):
        Adapter.add(folder, lm)
    assert torch.equal(logits(lm), before)
