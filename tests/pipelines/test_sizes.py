"""Planned bytes and FLOPs are those of real models; every preset is built with its true shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from eval.harness.allocations import allocated_peak
from mac_rag.bank import MemoryBank
from mac_rag.config import BaseLMConfig, EncoderConfig, MACConfig, ModulationConfig
from mac_rag.data.types import Document
from mac_rag.engine import MACEngine
from mac_rag.errors import ConfigError, ModelLoadError
from mac_rag.model import MACModel
from mac_rag.model.presets import PAPER, PRESETS, SMALL, preset, sized_for
from mac_rag.nn.modulation import PrefixTuning
from mac_rag.untrusted_files import read_json
from pipelines.averaging import WeightMean
from pipelines.objective import Batch, LossWeights, mac_loss
from pipelines.sizes import (
    ANSWER_TOKENS,
    ARCHITECTURES,
    BASE_LM,
    QUESTION_TOKENS,
    Part,
    architecture,
    document_bytes,
    empty_model,
    sizes_of,
)
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import LORA_RANK
from tests.helpers import VOCABULARY, Folder, mac_config, save_tokenizer
from tests.lm.helpers import ARCHITECTURES as KNOWN_TO_WORK
from tests.pipelines.helpers import TRAINER

DOCUMENTS, TOKENS = 4, 256
SINK = ModulationConfig(attention_sink=True)
LOSSES = LossWeights(answer=1, direct=0.5, contrastive=0.3)

# As the models' pages on the Hub count them.
PUBLISHED = {
    "distilbert/distilgpt2": 81_912_576,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "google-t5/t5-small": 60_506_624,
    "google-t5/t5-base": 222_903_552,
    "google-t5/t5-large": 737_668_096,
    "smollm2-135m": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "google/gemma-3-1b-pt": 999_885_952,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
}


def recipe_of(config: MACConfig, **values: Any) -> TrainConfig:
    losses = LOSSES.model_dump()
    return TrainConfig.model_validate({"model": config.model_dump(), "losses": losses, "trainer": TRAINER, **values})


def total(parts: dict[str, Part], kind: str) -> int:
    return sum(part.training[kind] for part in parts.values())


class TestShapes:
    def test_every_model_of_the_table_has_the_published_number_of_weights(self) -> None:
        assert read_json(ARCHITECTURES, 1 << 20).keys() == PUBLISHED.keys()
        for name, count in PUBLISHED.items():
            described = architecture(name)
            with torch.device("meta"):
                kind: Any = AutoModel if described.model_type == "t5" else AutoModelForCausalLM
                model = kind.from_config(described)
            assert sum(parameter.numel() for parameter in model.parameters()) == count, name

    @pytest.mark.parametrize("name", PRESETS)
    def test_presets_are_built_around_their_lm(self, name: str) -> None:
        config = preset(name)
        model, lm = empty_model(config), architecture(config.base_lm.name)
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
        assert model.row_shape == (config.tokens, lm.hidden_size)
        assert model.context_window == config.context_window or config.context_window is None
        assert isinstance(model.modulation, PrefixTuning)
        assert model.modulation.shape.layers == lm.num_hidden_layers
        backbone = model.amortization.network.backbone.config
        assert backbone.hidden_size == (lm.hidden_size if name in SMALL else backbone.d_model)
        if name in PAPER:
            assert config.amortization.name is not None
            return
        assert backbone.num_hidden_layers == config.amortization.layers
        assert model.modulation.prefix_length == config.tokens + 1  # behind one token of the sink
        # The encoders read with the LM's embeddings and bring none.
        embedded = model.base_lm.model.get_input_embeddings().weight
        assert all(tensor.shape != embedded.shape for tensor in model.amortization.parameters())

    @pytest.mark.parametrize(
        ("lm", "encoder", "design", "modulation"),
        [
            ("llama", None, "decoder-only", SINK),
            ("llama", None, "encoder-pooling", SINK),
            ("gpt2", "t5", "encoder-decoder", ModulationConfig(bottleneck=8)),
            ("gpt2", "t5", "encoder-only", ModulationConfig(kind="lora")),
            ("llama", "bert", "encoder-only", ModulationConfig(kind="film")),
        ],
    )
    def test_shapes_are_those_of_the_real_model(
        self, model_folder: Folder, lm: str, encoder: str | None, design: str, modulation: ModulationConfig
    ) -> None:
        folder = None if encoder is None else model_folder(encoder)
        config = mac_config(model_folder(lm), folder, design, modulation=modulation)
        if folder is None:
            part = config.amortization.model_copy(update={"layers": 1})
            config = config.model_copy(update={"amortization": part, "input_encoder": part})
        real, empty = MACModel.from_config(config, device="cpu"), empty_model(config)
        assert _shapes(empty) == _shapes(real)

    def test_models_without_sizes(self, tmp_path: Path, model_folder: Folder) -> None:
        with pytest.raises(ModelLoadError, match="nowhere"):
            architecture(str(tmp_path / "nowhere"))
        config = mac_config(model_folder("llama"))
        quantised = config.model_copy(update={"base_lm": BaseLMConfig(name="folder", gguf_file="a.gguf")})
        with pytest.raises(ConfigError, match=r"a\.gguf tells its sizes only once it is read"):
            empty_model(quantised)
        deep = config.model_copy(update={"amortization": EncoderConfig(design="decoder-only", name=None, layers=9)})
        with pytest.raises(ModelLoadError, match="layers is 9, but the LM has 2"):
            empty_model(deep)
        later = TrainConfig.model_validate({"start_from": "mac-tiny", "trainer": TRAINER})
        with pytest.raises(ConfigError, match="starts from mac-tiny"):
            sizes_of(later)


def _shapes(model: MACModel) -> dict[str, tuple[Any, ...]]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


class TestRuleOfSizes:
    @pytest.mark.parametrize("name", SMALL)
    def test_presets_follow_it(self, name: str) -> None:
        config, lm = preset(name), architecture(preset(name).base_lm.name)
        assert lm.model_type in KNOWN_TO_WORK
        nf4 = config.base_lm.quantization == "nf4"
        assert config == sized_for(
            config.base_lm.name, width=lm.hidden_size, layers=lm.num_hidden_layers, quantized=nf4,
            context_window=config.context_window,
        )  # fmt: skip
        assert nf4 == (PUBLISHED[config.base_lm.name] >= 4e9)
        assert config.amortization == config.input_encoder  # which `init: kv_regression` needs, and no bottleneck
        assert config.modulation == ModulationConfig(kind="prefix", attention_sink=True)
        assert config.aggregation.heads * config.aggregation.head_width == lm.hidden_size
        assert 24 <= config.tokens <= 96
        assert config.tokens in (24, 96) or abs(config.tokens * lm.hidden_size - 65_536) <= 4 * lm.hidden_size

    @given(heads=st.integers(1, 256), layers=st.integers(1, 200), quantized=st.booleans())
    def test_it_gives_a_model_for_any_lm(self, heads: int, layers: int, quantized: bool) -> None:
        config = sized_for("my/lm", width=64 * heads, layers=layers, quantized=quantized)
        assert config.tokens % 8 == 0
        assert 24 <= config.tokens <= 96
        assert 1 <= config.amortization.layers <= layers
        wider = sized_for("my/lm", width=64 * heads + 64, layers=layers, quantized=quantized)
        assert wider.tokens <= config.tokens
        assert wider.mlp_width >= config.mlp_width


def stored_bytes(model: nn.Module) -> int:
    """Memory of the weights and buffers of a real module, each once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}.values())


class TestCountedBytes:
    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_weights_while_answering(self, model_folder: Folder, dtype: Any) -> None:
        for config in (
            mac_config(model_folder("llama"), None, "encoder-pooling"),
            mac_config(model_folder("gpt2"), model_folder("t5"), "encoder-decoder"),
        ):
            config = config.model_copy(update={"base_lm": config.base_lm.model_copy(update={"dtype": dtype})})
            parts, real = sizes_of(recipe_of(config)), MACModel.from_config(config, device="cpu")
            assert sum(part.answering["weights"] for part in parts.values()) == stored_bytes(real)
            assert parts[BASE_LM].answering["weights"] == stored_bytes(real.base_lm)
            assert sum(part.weights for part in parts.values()) == sum(p.numel() for p in real.parameters())

    @pytest.mark.parametrize(
        "values",
        [{}, {"tune_base_lm": "full"}, {"tune_base_lm": "lora"}, {"trainer": {**TRAINER, "average_from": 0.5}}],
    )
    def test_a_training_step(self, model_folder: Folder, values: dict[str, Any]) -> None:
        """The tensors of a real step: weights, gradients, and the optimizer's state with the mean of the weights."""
        config = mac_config(model_folder("llama"), None, "encoder-pooling", modulation=SINK)
        part = config.amortization.model_copy(update={"layers": 1, "embeddings": "base-lm"})
        recipe = recipe_of(config.model_copy(update={"amortization": part, "input_encoder": part}), **values)

        real = MACModel.from_config(recipe.model, device="cpu")
        if recipe.tune_base_lm != "frozen":
            real.train_base_lm(lora_rank=LORA_RANK if recipe.tune_base_lm == "lora" else None)
        real.use_master_weights()
        optimizer = torch.optim.AdamW([p for p in real.parameters() if p.requires_grad], fused=True)
        texts = ["Ada Voss was appointed.", "A storm has hit Haib."]
        batch = Batch(texts, ["Who?", "What?"], ["Ada Voss", "a storm"], [0, 1])
        mac_loss(real, batch, LOSSES)[0]["loss"].backward()
        optimizer.step()
        states = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
        start = recipe.trainer.average_from
        kept = {} if start is None else WeightMean(real, 2, start).state(2)

        parts = sizes_of(recipe)
        assert total(parts, "weights") == stored_bytes(real)
        assert total(parts, "gradients") == sum(p.grad.nbytes for p in real.parameters() if p.grad is not None)
        assert total(parts, "gradients") == 4 * sum(part.trained for part in parts.values())
        assert total(parts, "optimizer") == states + sum(mean.nbytes for mean in kept.values())

    def test_4_bit_halves_a_byte(self) -> None:
        """And has a scale for each 64 weights: 7B of 6.6 billion weights in linear layers of 32 blocks."""
        half, in_4_bit = preset("llama2-7b"), sizes_of(recipe_of(preset("llama2-7b")))
        half = half.model_copy(update={"base_lm": half.base_lm.model_copy(update={"quantization": "none"})})
        saved = sizes_of(recipe_of(half))[BASE_LM].training["weights"] - in_4_bit[BASE_LM].training["weights"]
        linear = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
        assert saved == linear * 2 - linear * 9 // 16

    @pytest.mark.parametrize("rows", ["bf16", "int8"])
    def test_documents_in_a_bank(self, model_folder: Folder, tmp_path: Path, rows: Any) -> None:
        config = mac_config(model_folder("llama"), max_document_tokens=64)
        model = MACModel.from_config(config, device="cpu")
        engine = MACEngine(model, MemoryBank.create(tmp_path / "bank", model.fingerprint, rows=rows))
        engine.adapt([Document(str(number), f"{number} storms have hit Haib.") for number in range(8)])
        assert engine.bank.nbytes == 8 * document_bytes(empty_model(config), rows)

    def test_answering_keeps_a_cache_and_the_bank(self, model_folder: Folder) -> None:
        config = mac_config(model_folder("llama"))
        parts = sizes_of(recipe_of(config), documents=10, questions=3, context=100)
        # Positions of prefix and context, in layers with keys and values of two heads of 16 numbers each.
        assert parts[BASE_LM].answering["cache"] == 3 * (4 + 100) * 2 * 2 * 2 * 16 * 4
        assert parts["aggregation network"].answering["bank"] == 10 * 2 * 2 * 4 * 2 * 8 * 4
        assert parts["aggregation network"].answering["summaries"] == 10 * 4 * (16 + 2 * 2)
        larger = sizes_of(recipe_of(config), documents=10**9)
        assert larger["aggregation network"].answering["bank"] == 2 << 30  # the rest is projected when it is needed
        twice = sizes_of(recipe_of(mac_config(model_folder("llama"), memory_weight=0.5)), questions=3, context=100)
        assert twice[BASE_LM].answering["cache"] == 2 * parts[BASE_LM].answering["cache"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, so that the step of a test is mostly layers, as that of a large LM."""
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0, hidden_size=128, intermediate_size=384,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, "<s> $A")
    return folder


def grown(count: int, length: Callable[[str], int]) -> str:
    """A text of so many tokens."""
    text = "a"
    while length(text) < count:
        text += " b"
    return text


def step_of(config: MACConfig, losses: LossWeights, bf16: bool, recompute: bool = False) -> Callable[[], None]:
    """The forward and backward pass of a real model, to whose weights gradients are there already."""
    model = MACModel.from_config(config, device="cpu")
    model.use_master_weights()
    model.train()
    if recompute:
        for encoder in (model.amortization, model.input_encoder):
            for layer in encoder.network.backbone.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    prompts = model.base_lm.prompts
    document = grown(TOKENS, lambda text: len(model.amortization.ids(text)))
    question = grown(QUESTION_TOKENS, lambda text: len(prompts.prompt(text)))
    answer = grown(ANSWER_TOKENS, lambda text: len(prompts.answer(text)))
    batch = Batch([document] * DOCUMENTS, [question] * DOCUMENTS, [answer] * DOCUMENTS, range(DOCUMENTS))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = mac_loss(model, batch, losses)[0]["loss"]
        loss.backward()

    step()
    return step


def planned(config: MACConfig, losses: LossWeights, bf16: bool, recompute: bool = False) -> dict[str, Part]:
    trainer = {"batch_size": DOCUMENTS, "precision": "bf16" if bf16 else "fp32", "gradient_checkpointing": recompute}
    return sizes_of(recipe_of(config, losses=losses.model_dump(), trainer={**TRAINER, **trainer}))


def config_of(design: str, llama: Path, model_folder: Folder) -> MACConfig:
    encoder = model_folder("t5") if design == "encoder-decoder" else None
    return mac_config(llama, encoder, design, tokens=16, mlp_width=16, max_document_tokens=TOKENS, modulation=SINK)


@pytest.mark.parametrize("design", ["encoder-pooling", "decoder-only", "encoder-decoder"])
def test_the_flops_of_a_step_are_near_those_that_pytorch_counts(llama: Path, model_folder: Folder, design: str) -> None:
    config = config_of(design, llama, model_folder)
    step = step_of(config, LOSSES, bf16=False)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # of which all products are counted
        step()
    flops = sum(part.flops["step"] for part in planned(config, LOSSES, bf16=False).values())
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.05)


@pytest.mark.parametrize("design", ["encoder-pooling", "decoder-only", "encoder-decoder"])
def test_the_flops_of_a_document_and_of_a_question_are_near_those_that_pytorch_counts(
    llama: Path, model_folder: Folder, design: str
) -> None:
    config = config_of(design, llama, model_folder)
    model = MACModel.from_config(config, device="cpu").eval().requires_grad_(False)
    prompts = model.base_lm.prompts
    document = grown(TOKENS, lambda text: len(model.amortization.ids(text)))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        phi = model.amortization([model.amortization.ids(document)] * 16)
        bank = model.aggregation.project(phi)
    parts = sizes_of(recipe_of(config), documents=16, context=QUESTION_TOKENS + ANSWER_TOKENS)
    flops = sum(part.flops["document"] for part in parts.values())
    assert 16 * flops == pytest.approx(counter.get_total_flops(), rel=0.05)
    asked = grown(QUESTION_TOKENS, lambda text: len(model.input_encoder.ids(text)))
    question = grown(QUESTION_TOKENS, lambda text: len(prompts.prompt(text)))
    answer = prompts.answer(grown(ANSWER_TOKENS, lambda text: len(prompts.answer(text))))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        encoded = model.input_encoder([model.input_encoder.ids(asked)])
        aggregated, _ = model.aggregation(encoded, bank)
        model.base_lm.answer_logits([prompts.prompt(question)], [answer], model.modulation(aggregated))
    flops = sum(part.flops["question"] for part in parts.values())
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.05)


@pytest.mark.parametrize(
    ("design", "bf16"),
    [
        ("encoder-pooling", True),  # as in the presets of small LMs
        *(
            pytest.param(design, bf16, marks=pytest.mark.slow)
            for design, bf16 in product(["encoder-pooling", "decoder-only", "encoder-decoder"], [False, True])
        ),
    ],
)
def test_activations_are_near_the_measured_peak(
    llama: Path, model_folder: Folder, monkeypatch: pytest.MonkeyPatch, design: str, bf16: bool
) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    config = config_of(design, llama, model_folder)
    found = total(planned(config, LOSSES, bf16), "activations")
    measured = allocated_peak(step_of(config, LOSSES, bf16), torch.device("cpu"))[1]
    assert measured / 1.5 < found < 1.5 * measured


@pytest.mark.parametrize("bf16", [pytest.param(False, marks=pytest.mark.slow), True])
def test_layers_computed_again_keep_their_inputs(llama: Path, monkeypatch: pytest.MonkeyPatch, bf16: bool) -> None:
    """Without a loss of the LM, so that the encoders' layers are most of the memory."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")
    config = mac_config(llama, None, "decoder-only", tokens=16, mlp_width=16, max_document_tokens=TOKENS)
    losses, cpu = LossWeights(answer=0, contrastive=1), torch.device("cpu")
    whole = allocated_peak(step_of(config, losses, bf16), cpu)[1]
    measured = allocated_peak(step_of(config, losses, bf16, recompute=True), cpu)[1]
    found = total(planned(config, losses, bf16, recompute=True), "activations")
    assert measured < whole / 1.5
    assert measured / 1.5 < found < 1.5 * measured
