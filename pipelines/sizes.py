"""Bytes and FLOPs of a model, part by part: of a training step, of adapting to a document, and of a question.

A model is built with its true shapes on PyTorch's meta device, so no weights are loaded. Bytes of weights, gradients
and optimizer are counted. `tests/pipelines/test_sizes.py` compares them with real models to the byte, FLOPs within 5 %
of what PyTorch counts, and activations within a factor of 1.5 of the measured peak.

- A matrix of n weights takes 2 n FLOPs for each token, and attention of width d takes 4 d for each pair of tokens. The
  backward pass takes as much for the inputs, and again as much for weights that are trained.
- A layer of width d whose feed-forward network is m wide keeps e (8 d + 4 m) + 16 d bytes of each token for its
  backward pass, where e is 2 in bf16 and 4 in fp32; attention that keeps its scores (T5), 12 for each score. With
  gradient checkpointing a layer keeps its input, 4 d bytes, and one layer at a time is computed again.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from mac_rag.config import AttentionConfig, EncoderConfig, MACConfig, PromptFormat
from mac_rag.errors import ConfigError, ModelLoadError
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.devices import DTYPES
from mac_rag.lm.fetched import local_place
from mac_rag.lm.loading import describe_first_layers, empty_backbone, loaded
from mac_rag.lm.model_folders import pinned
from mac_rag.model import AmortizedModel
from mac_rag.model.factory import make_encoder
from mac_rag.nn.amortization import EncoderDecoder, EncoderPooling
from mac_rag.untrusted_files import read_json
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import LORA_RANK
from pipelines.training_task import TrainerConfig

QUESTION_TOKENS, ANSWER_TOKENS = 32, 8  # of a prompt without documents, and of an answer
PARTS = ("base LM", "amortization network", "input encoder", "aggregation network", "modulation")
BASE_LM, AMORTIZATION, INPUT, AGGREGATION, MODULATION = PARTS
ARCHITECTURES = Path(__file__).with_name("architectures.json")  # sizes of the presets' LMs and encoders, as published
_BYTES = {"nf4": 0.5 + 4 / 64, "int8": 1.0}  # of a quantised weight: NF4 has a scale in fp32 for each 64


@dataclass
class Part:
    """Bytes and FLOPs of one part of a model.

    Attributes:
        weights, trained: numbers of all weights, and of those that training changes.
        training: kind -> bytes on one GPU in a training step.
        answering: kind -> bytes while questions are answered.
        flops: `step`, `document` or `question` -> FLOPs.
    """

    weights: int = 0
    trained: int = 0
    training: dict[str, int] = field(default_factory=dict)
    answering: dict[str, int] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=lambda: {"step": 0, "document": 0, "question": 0})


def architecture(name: str, revision: str | None = None) -> Any:
    """The transformers configuration of a folder, of a model in `architectures.json`, or of a repository on the Hub."""
    sizes = None if Path(name).is_dir() else read_json(ARCHITECTURES, 1 << 20).get(name)
    if sizes is not None:
        return AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    place = local_place(name, revision)
    return loaded("an architecture", place, AutoConfig.from_pretrained, revision=pinned(place, revision))


def empty_model(config: MACConfig) -> AmortizedModel:
    """A MAC model with its shapes and without numbers.

    Raises:
        ConfigError: for a GGUF file; for a sentence encoder or hashed BM25.
        ModelLoadError: if there is no such LM or encoder, or an architecture does not fit its design.
    """
    if config.base_lm.gguf_file is not None:
        raise ConfigError(f"{config.base_lm.gguf_file} tells its sizes only once it is read; give an LM in safetensors")
    if config.sentence_encoder is not None or config.hashed_bm25 is not None:
        raise ConfigError("a sentence_encoder and hashed_bm25 depend on a tokenizer, and have no plan; leave them out")
    described = architecture(config.base_lm.name, config.base_lm.revision)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(described, dtype=DTYPES[config.base_lm.dtype], trust_remote_code=False)
        base_lm = BaseLM(lm.requires_grad_(False).eval(), _tokenizer(described.vocab_size), PromptFormat())
        encoders = []
        for part in (config.amortization, config.input_encoder):
            backbone: Any = empty_backbone(part, _described(part, described))
            if part.quantization != "none":  # quantised weights are frozen; the decoder of a T5 is not quantised
                for name, parameter in backbone.named_parameters():
                    parameter.requires_grad_(part.design == "encoder-decoder" and name.startswith("decoder."))
            alike = backbone.config.vocab_size == described.vocab_size
            tokenizer = base_lm.tokenizer if alike else _tokenizer(backbone.config.vocab_size)
            encoders.append(make_encoder(config, part, backbone, tokenizer, base_lm))
        # Templates of prompts change no size, and the stand-in for a tokenizer has no chat template.
        return AmortizedModel(config.model_copy(update={"prompt": PromptFormat()}), base_lm, *encoders)


def _described(part: EncoderConfig, lm: Any) -> Any:
    if part.name is not None:
        return architecture(part.name, part.revision)
    described = copy.deepcopy(lm)
    layers = lm.num_hidden_layers if part.layers is None else part.layers
    if layers > lm.num_hidden_layers:
        raise ModelLoadError(f"layers is {layers}, but the LM has {lm.num_hidden_layers}; give fewer")
    describe_first_layers(described, layers)
    return described


def _tokenizer(vocabulary: int) -> Any:
    """A stand-in of a few words for a tokenizer, another one for each size of a vocabulary."""
    words = {f"{number} of {vocabulary}": number for number in range(3)}
    unknown, pad, eos = words
    model = Tokenizer(WordLevel(words, unk_token=unknown))
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token=unknown, pad_token=pad, eos_token=eos)


def document_bytes(model: AmortizedModel, rows: str) -> int:
    """Bytes of a document in a bank on disk whose rows are `bf16` or `int8`."""
    width = model.base_lm.width
    return model.config.tokens * (2 * width if rows == "bf16" else width + 4) + 4 * model.aggregation.summary_width


def sizes_of(recipe: TrainConfig, documents: int = 10_000, questions: int = 1, context: int = 2048) -> dict[str, Part]:
    """The parts of the model that a recipe trains, on documents as long as the model reads.

    Args:
        documents: documents in the bank, each of one chunk.
        questions: questions answered at once.
        context: tokens of documents, question and answer before the LM.

    Raises:
        ConfigError, ModelLoadError: as `empty_model`; for a recipe that starts from a trained model.
    """
    if recipe.model is None:
        raise ConfigError(f"the recipe starts from {recipe.start_from}; name a preset, or a recipe with a model")
    model, parts = empty_model(recipe.model), {name: Part() for name in PARTS}
    for name, (_, size) in _weights(model).items():
        parts[name].answering["weights"] = size
    _answer(model, parts, documents, questions, context)
    with torch.device("meta"):
        if recipe.tune_base_lm != "frozen":
            model.train_base_lm(lora_rank=LORA_RANK if recipe.tune_base_lm == "lora" else None)
        model.use_master_weights()
    for name, (weights, size) in _weights(model).items():
        changed = [weight for weight in weights if weight.requires_grad]
        parts[name].weights = sum(weight.numel() for weight in weights)
        _optimize(parts[name], changed, size, recipe.trainer)
    _train(model, parts, recipe)
    return parts


def _weights(model: AmortizedModel) -> dict[str, tuple[list[nn.Parameter], int]]:
    """The parameters of each part, and its bytes with buffers; what parts share belongs to the first of them."""
    config, seen, quantized, found = model.config, set[int](), {}, {}
    kinds = [part.quantization for part in (config.amortization, config.input_encoder)]
    networks = (model.base_lm.model, model.amortization.network.backbone, model.input_encoder.network.backbone)
    for kind, network in zip((config.base_lm.quantization, *kinds), networks, strict=True):
        for name, module in network.named_modules() if kind != "none" else ():
            if isinstance(module, nn.Linear | Conv1D) and not {"decoder", "lm_head"} & set(name.split(".")):
                quantized[id(module.weight)] = int(module.weight.numel() * _BYTES[kind])
    modules = (model.base_lm, model.amortization, model.input_encoder, model.aggregation, model.modulation)
    for name, module in zip(PARTS, modules, strict=True):
        tensors = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in seen]
        seen.update(map(id, tensors))
        size = sum(quantized.get(id(t), t.numel() * t.element_size()) for t in tensors)
        found[name] = [t for t in tensors if isinstance(t, nn.Parameter)], size
    return found


def _optimize(part: Part, changed: list[nn.Parameter], size: int, trainer: TrainerConfig) -> None:
    """Adds the bytes of a part's weights, their gradients and the optimizer's state."""
    part.trained = sum(weight.numel() for weight in changed)
    mean = 0 if trainer.average_from is None else 4 * part.trained
    copies = 2 * sum(weight.numel() for weight in changed if weight.ndim >= 2)  # autocast's, during a step
    part.training = {
        "weights": size,
        "gradients": sum(weight.numel() * weight.element_size() for weight in changed),
        "optimizer": 8 * part.trained + 4 * len(changed) + mean,  # two moments, and the step
        "activations": copies if trainer.precision == "bf16" else 0,
    }


def _train(model: AmortizedModel, parts: dict[str, Part], recipe: TrainConfig) -> None:
    """Adds the FLOPs of an optimizer step, and the bytes that each of its passes keeps for the backward pass."""
    trainer, losses, again = recipe.trainer, recipe.losses, recipe.trainer.gradient_checkpointing
    number, documents, read = 2 if trainer.precision == "bf16" else 4, trainer.batch_size, model.amortization.max_tokens
    questions = documents * recipe.questions_per_document
    live = max(1, round((1 - recipe.backprop_dropout) * documents))
    retrieved = recipe.context.k if recipe.context.retriever != "none" and recipe.context.rate else (0,)

    def add(name: str, flops: int, kept: int) -> None:
        parts[name].flops["step"] += trainer.accumulate * flops
        parts[name].training["activations"] += kept

    forward, backward, kept = _encoder(model.amortization.network, read, number, again)
    add(AMORTIZATION, documents * forward + live * backward, live * kept)
    forward, backward, kept = _encoder(model.input_encoder.network, QUESTION_TOKENS, number, again)
    add(INPUT, questions * (forward + backward), questions * kept)
    rows = documents + min(recipe.negatives, recipe.distractors * questions)
    projecting, asking, kept = _aggregation(model, rows, questions, number)
    add(AGGREGATION, 3 * (rows * projecting + questions * asking), kept)
    # For each term of the loss: number of rows, tokens of their prompts, one of which is drawn, and of their target.
    after_documents = (questions, [QUESTION_TOKENS + count * read for count in retrieved], ANSWER_TOKENS)
    passes = [after_documents] * bool(losses.answer)
    passes += [(questions, [QUESTION_TOKENS], ANSWER_TOKENS)] * bool(losses.direct)
    passes += [(documents, [1], read)] * bool(losses.reconstruction)
    for count, prompts, answer in passes:
        lengths = [model.config.tokens_in_prompt + min(prompt + answer, model.context_window) for prompt in prompts]
        each = [_lm(model, tokens, answer, number, again) for tokens in lengths]
        flops, kept = sum(flops for flops, _ in each) // len(each), max(kept for _, kept in each)
        add(BASE_LM, count * (2 + (recipe.tune_base_lm == "full") + again) * flops, count * kept)
        add(MODULATION, count * 3 * parts[MODULATION].flops["question"], 0)


def _answer(model: AmortizedModel, parts: dict[str, Part], documents: int, questions: int, context: int) -> None:
    """Adds the bytes of answering, and the FLOPs of adapting to one document and of answering one question."""
    config, sizes, attention = model.config, model.config.aggregation, AttentionConfig()
    shape, readings = model.base_lm.shape(config.modulation), 1 if config.memory_weight == 1 else 2
    read = min(context, model.context_window)
    position = shape.layers * 2 * shape.kv_heads * shape.head_width * model.base_lm.dtype.itemsize
    parts[BASE_LM].answering["cache"] = questions * readings * (read + model.modulation.prefix_length) * position
    row = sizes.blocks * 2 * config.tokens * sizes.heads * sizes.head_width * 4
    parts[AGGREGATION].answering["bank"] = min(documents * row, attention.cache_bytes)
    parts[AGGREGATION].answering["summaries"] = documents * 4 * model.aggregation.summary_width
    parts[AGGREGATION].flops["document"], parts[AGGREGATION].flops["question"], _ = _aggregation(model, documents)
    parts[AMORTIZATION].flops["document"] = _encoder(model.amortization.network, model.amortization.max_tokens)[0]
    parts[INPUT].flops["question"] = _encoder(model.input_encoder.network, QUESTION_TOKENS)[0]
    parts[MODULATION].flops["question"] = 2 * _matrices(model.modulation) * config.modulation_tokens
    parts[BASE_LM].flops["question"] = readings * _lm(model, read, ANSWER_TOKENS)[0]


def _encoder(network: Any, tokens: int, number: int = 4, again: bool = False) -> tuple[int, int, int]:
    """FLOPs of an encoder for one text, forward and backward, and bytes that it keeps in numbers of so many bytes."""
    backbone, config, mlps, count = network.backbone, network.backbone.config, network.mlps, len(network.queries)
    width, frozen = config.hidden_size, 0
    if isinstance(network, EncoderDecoder):
        flops, kept = _layers(config, _matrices(backbone.encoder), tokens, tokens, number, again)
        if not any(parameter.requires_grad for parameter in backbone.encoder.parameters()):
            frozen, kept = flops, 0
        of_text = sum(_matrices(block.layer[1].EncDecAttention.k) for block in backbone.decoder.block) * 2
        decoding = _layers(config, _matrices(backbone.decoder) - of_text, count, count + tokens, number, again)
        flops, kept = flops + decoding[0] + 2 * of_text * tokens, kept + decoding[1]
    elif isinstance(network, EncoderPooling):
        flops, kept = _layers(config, _matrices(backbone), tokens, tokens, number, again)
        flops += 2 * width * width * (2 * tokens + count) + 4 * width * count * tokens
        kept += tokens * (16 + 5 * number) * width + 12 * config.num_attention_heads * count * tokens
    else:
        flops, kept = _layers(config, _matrices(backbone), tokens + count, tokens + count, number, again)
    flops += 2 * (mlps.inner.numel() + mlps.outer.numel() + count * _matrices(mlps))
    kept += count * (4 * (3 * width + mlps.outer.shape[2]) + 3 * number * mlps.outer.shape[1])
    return flops, (2 + again) * (flops - frozen), kept


def _aggregation(model: AmortizedModel, rows: int, questions: int = 1, number: int = 4) -> tuple[int, int, int]:
    """FLOPs of a row's keys and values, and of a question to so many rows; bytes that a step keeps of all."""
    sizes, tokens, width = model.config.aggregation, model.config.tokens, model.base_lm.width
    inner, asked, wide = sizes.heads * sizes.head_width, model.config.modulation_tokens, sizes.feed_forward * width
    projecting = sizes.blocks * 4 * width * inner * tokens
    asking = sizes.blocks * asked * 4 * (width * (inner + wide) + inner * rows * tokens)
    kept = rows * tokens * (8 * width + sizes.blocks * 2 * (number + 4) * inner)
    kept += questions * asked * sizes.blocks * (24 * width + number * (4 * inner + 3 * wide))
    return projecting, asking, kept


def _lm(model: AmortizedModel, read: int, logits: int, number: int = 4, again: bool = False) -> tuple[int, int]:
    """FLOPs and kept bytes of the LM for one row, which reads a prefix and so many tokens and gives so many logits."""
    lm, config, shape = model.base_lm, model.base_lm.model.config, model.base_lm.shape(model.config.modulation)
    head, prefix = config.hidden_size * config.vocab_size, model.modulation.prefix_length
    number = min(number, lm.dtype.itemsize)
    flops, kept = _layers(config, _matrices(lm.model) - head, read, read + prefix, number, again)
    # A prefix is kept three times: as generated, rotated, and in the LM's dtype.
    kept += prefix * shape.layers * 2 * shape.kv_heads * shape.head_width * (number + 12)
    return flops + 2 * head * logits, kept + logits * config.vocab_size * (number + 8)


def _layers(config: Any, weights: int, tokens: int, seen: int, number: int, again: bool) -> tuple[int, int]:
    """FLOPs and kept bytes of a transformer's layers for tokens that attend to `seen` tokens each."""
    heads, width, count = config.num_attention_heads, config.hidden_size, config.num_hidden_layers
    head = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or width // heads
    names = ("intermediate_size", "d_ff", "n_inner", "ffn_dim")
    inner = next((size for name in names if (size := getattr(config, name, None))), 4 * width)
    layer = number * (8 * width + 4 * inner) + 16 * width + (12 * heads * seen if config.model_type == "t5" else 0)
    kept = tokens * (count * 4 * width + layer if again else count * layer)
    return int(2 * weights * tokens + 4 * count * heads * head * tokens * seen), int(kept)


def _matrices(module: nn.Module) -> int:
    """Numbers in all linear maps."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear | Conv1D))
