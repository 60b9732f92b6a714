"""Tiny random LMs of the real classes, and what every one of them must do under every modulation in every dtype."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mac_rag.config import BaseLMConfig, ModulationConfig, PromptFormat
from mac_rag.data.types import Decoded
from mac_rag.lm.attention_sink import make_attention_sink
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.continuous_batch import Answers, ContinuousBatch
from mac_rag.lm.loading import load_causal_lm
from mac_rag.nn.modulation import FiLM, LoRA, Modulation, ModulationNetwork, PrefixTuning
from pipelines.objective import Batch
from tests.helpers import VOCABULARY, save_tokenizer

KINDS = ["prefix", "lora", "film"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Largest root mean square difference of log-probabilities from the plain loop in the same dtype, in standard deviations
# of these. The memory changes them by more than twice as much in every cell, so a memory that is lost is noticed.
TOLERANCES = {"fp32": 1e-4, "bf16": 0.08, "fp16": 0.01}
# The same for quantised weights: int8 multiplies in fp16, and columns of outliers apart for each batch.
QUANTIZED_TOLERANCES = {"nf4": 0.08, "int8": 0.15}
WINDOW, TOKENS, NEW = 8, 4, 6
TEXTS = ["A storm closed the port of Riga.", "The mayor of Lisbon opened a bridge."]
QUESTIONS = ["Which port?", "Who opened a bridge in the town of Lisbon?"]
BATCH = Batch(TEXTS, QUESTIONS, ["Riga", "the mayor"], [0, 1])

_WORDS: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {**_WORDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_MOST = {**_SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 4096}
_WINDOW = {**_MOST, "sliding_window": WINDOW}
_MIXED = {**_WINDOW, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {**_WORDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 4096},
    "llama": _MOST,
    "qwen2": _MOST,
    "qwen3": {**_MOST, "head_dim": 32},
    "qwen2_moe": {
        **_MOST, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mistral": _WINDOW,
    "mixtral": {**_WINDOW, "num_local_experts": 4},
    "gemma2": {**_MIXED, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_MIXED, "query_pre_attn_scalar": 16},
    "phi": _MOST,
    "phi3": _WINDOW,
    "olmo2": _MOST,
    "smollm3": {**_MOST, "no_rope_layers": [1, 0]},
    "gpt_oss": {**_MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {**_SIZES, "intermediate_size": 64, "max_position_embeddings": 4096},
    "opt": {**_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 64, "max_position_embeddings": 4096},
    "falcon": {**_SIZES, "alibi": False, "max_position_embeddings": 4096},
    "stablelm": _MOST,
    "granite": {**_MOST, "attention_multiplier": 0.25},  # as others scale; its default of 1 is no real model's
    "cohere2": _MIXED,
}  # fmt: skip

# LMs that mac_rag handles as it handles another one of the list.
ALIKE = {"llama", "qwen2", "qwen3", "qwen2_moe", "mistral", "phi", "gemma2", "olmo2", "stablelm"}
LEARNED_POSITIONS = ("gpt2", "opt")  # no rotation: positions are a part of the hidden states

# LMs that turn their keys in further ways: neighbours as pairs, in a part of the width, or the other way round.
ROTATIONS: dict[str, dict[str, Any]] = {
    "glm4": {**_MOST, "head_dim": 16},
    "helium": {**_MOST, "head_dim": 16},
    "nanochat": _MOST,
    "cohere": _MOST,
    "exaone4": _MIXED,
}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 512},
    {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
]  # fmt: skip

# LMs with layers that have no keys and values: they carry LoRA and FiLM.
HYBRIDS: dict[str, dict[str, Any]] = {
    "jamba": {
        **_MOST, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 8,
    },
    "lfm2": {**_MOST, "layer_types": ["conv", "full_attention"]},
    "qwen3_next": {
        **_MOST, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
}  # fmt: skip
# LMs of which some layers have no keys and values that could be a prefix, and LMs that are not supported at all: why.
WITHOUT_PREFIX = [
    *((name, "state-space layers or convolutions") for name in HYBRIDS),
    ("deepseek_v3", "keys and values differ in width"),
    ("gemma3n_text", "share keys and values"),
]
UNSUPPORTED = [
    *((name, "keeps its state in a cache of its own") for name in ("mamba", "mamba2", "rwkv")),
    *((name, "does not say how many positions it has") for name in ("bloom", "mpt")),
    ("gemma3", "is more than a text model"),
]


class Numbers:
    """A tokenizer whose text is the token ids themselves, so that answers can be compared token by token."""

    pad_token_id, eos_token_id = 0, 2

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        answer = takewhile(lambda token: token != self.eos_token_id, map(int, ids))
        return " ".join(map(str, answer))

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(row) for row in rows]


@cache
def _tokenizer() -> Any:
    with TemporaryDirectory() as folder:
        save_tokenizer(Path(folder), "<s> $A")
        return AutoTokenizer.from_pretrained(folder)


def random_lm(name: str, dtype: str = "fp32", **changes: Any) -> Any:
    """An LM of an architecture with random weights, frozen and in evaluation mode."""
    config = AutoConfig.for_model(name, **{**(ARCHITECTURES | ROTATIONS | HYBRIDS)[name], **changes})
    if dtype != "fp32" and hasattr(config, "num_experts_per_tok"):
        # A near tie of two experts may fall either way in half precision, and then all that follows differs.
        config.num_experts_per_tok = ARCHITECTURES[name].get("num_local_experts", 4)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).requires_grad_(False).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # its first weights are too small for tokens to matter
            parameter.copy_(0.15 * torch.randn(parameter.shape))
    return model


def quantized_lm(folder: Path, name: str, quantization: Any, modulation: str) -> Any:
    """A random LM of an architecture, saved to a folder and loaded with quantised weights."""
    # One row more than tokens, since the class of Qwen2's tokenizers adds a token of its own.
    random_lm(name, "bf16", vocab_size=VOCABULARY + 1).save_pretrained(folder)
    save_tokenizer(folder, "<s> $A")
    config = BaseLMConfig(name=str(folder), dtype="bf16", quantization=quantization)
    model: Any = load_causal_lm(config, torch.device("cpu"), modulation=modulation)[0]
    return model.requires_grad_(False).eval()


def lm_of_numbers(model: Any) -> BaseLM:
    """A transformers model as an LM whose answers are token ids as text."""
    lm = BaseLM(model, _tokenizer(), PromptFormat())
    lm.tokenizer = Numbers()
    return lm


def masks_by_hand(model: Any, seen: Tensor, near: Tensor, bias: Tensor | float = 0.0) -> Any:
    """Float masks of one row, for all layers or for each kind of layer that a model has.

    Args:
        model: the transformers model.
        seen: `[L, P + L]`, True where a query (row) may attend to a key (column).
        near: the same for layers with a sliding window.
        bias: `[L, P + L]`, added to the attention logits.
    """

    def additive(mask: Tensor) -> Tensor:
        masked = torch.zeros(mask.shape, dtype=model.dtype) + bias
        return masked.masked_fill(~mask, torch.finfo(model.dtype).min).to(model.dtype)[None, None]

    if getattr(model.config, "layer_types", None):
        return {"full_attention": additive(seen), "sliding_attention": additive(near)}
    return additive(near if getattr(model.config, "sliding_window", None) else seen)


@dataclass
class Cell:
    """One architecture in one dtype under one modulation.

    Attributes:
        lm: the LM; its answers are token ids as text.
        network: a modulation network, away from its start.
        phi: `[B, T, D]`.
        dtype: name of the LM's dtype.
        tolerance: largest root mean square difference of log-probabilities, in standard deviations of these.
        new: longest answer, in tokens.
    """

    lm: BaseLM
    network: ModulationNetwork
    phi: Tensor
    dtype: str
    tolerance: float
    new: int

    @classmethod
    def of(cls, name: str, kind: Any, dtype: str, **changes: Any) -> Cell:
        return cls.around(random_lm(name, dtype, **changes), kind, dtype)

    @classmethod
    def around(cls, model: Any, kind: Any, dtype: str, tolerance: float | None = None, new: int = NEW) -> Cell:
        """The cell of an LM with the weights that it has; without a tolerance it is that of tiny LMs."""
        lm = lm_of_numbers(model)
        torch.manual_seed(1)
        network = _network(lm, kind)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.6 if network.prefix_length else 0.3)
        return cls(lm, network, torch.randn(3, TOKENS, lm.width), dtype, tolerance or TOLERANCES[dtype], new)

    def modulation(self, *rows: int) -> Modulation:
        return self.network(self.phi[list(rows)])  # type: ignore[no-any-return]

    def plain_log_probs(self, ids: Sequence[int], modulation: Modulation | None, front: int = 0) -> Tensor:
        """Log-probabilities behind each token `[L, vocabulary]`: no padding, no cache of text, masks made by hand.

        Args:
            ids: L token ids.
            modulation: of one row; None for the LM alone.
            front: number of first tokens that all layers see from everywhere, as they see a prefix.
        """
        model, length = self.lm.model, len(ids)
        prefix = modulation.prefix_length if modulation else 0
        keys, queries = torch.arange(-prefix, length), torch.arange(length)[:, None]
        seen = keys <= queries
        near = seen & ((keys > queries - WINDOW) | (keys < front))
        if model.config.model_type in HYBRIDS:
            return self._log_probs({"input_ids": torch.tensor([ids])}, modulation)
        inputs = {
            "input_ids": torch.tensor([ids]),
            "position_ids": prefix + torch.arange(length)[None],
            "attention_mask": masks_by_hand(model, seen, near),
        }
        return self._log_probs(inputs, modulation)

    def _log_probs(self, inputs: dict[str, Any], modulation: Modulation | None) -> Tensor:
        # Without `attached` for a prefix, whose masks are whole already.
        hooked = modulation is not None and not modulation.prefix_length
        with modulation.attached(self.lm.model) if modulation and hooked else nullcontext():
            past = modulation.cache(self.lm.dtype) if modulation else None
            logits = self.lm.model(**inputs, past_key_values=past, use_cache=past is not None).logits
        return logits[0].float().log_softmax(-1)  # type: ignore[no-any-return]

    def plain_answer(self, prompt: Sequence[int], modulation: Modulation | None) -> list[int]:
        """The greedy answer, the whole sequence anew for each token."""
        answer: list[int] = []
        while len(answer) < self.new and (not answer or answer[-1] != Numbers.eos_token_id):
            answer.append(int(self.plain_log_probs([*prompt, *answer], modulation)[-1].argmax()))
        return answer

    def plain_answer_log_probs(
        self, prompt: Sequence[int], answer: Sequence[int], modulation: Modulation | None
    ) -> Tensor:
        """Log-probabilities in front of each token of an answer, `[tokens, vocabulary]`."""
        return self.plain_log_probs([*prompt, *answer], modulation)[len(prompt) - 1 : -1]

    def distance(self, found: Tensor, expected: Tensor) -> float:
        """How far log-probabilities `[tokens, vocabulary]` are from those expected; 1 is the largest allowed."""
        return float((found - expected).square().mean().sqrt() / expected.std() / self.tolerance)


def _network(lm: BaseLM, kind: Any) -> ModulationNetwork:
    if kind == "sink":
        sink = make_attention_sink(lm, TOKENS, None)
        return PrefixTuning(lm.shape(ModulationConfig()), TOKENS, lm.width, sink=sink)
    shape = lm.shape(ModulationConfig(kind=kind))
    if kind == "prefix":
        return PrefixTuning(shape, TOKENS, lm.width)
    return LoRA(shape, TOKENS, lm.width) if kind == "lora" else FiLM(shape, lm.width)


def prompts(longest: int = 10 * WINDOW) -> list[list[int]]:
    """Prompts of three lengths; the last is longer than any window."""
    random = torch.Generator().manual_seed(4)
    return [[1, *torch.randint(3, VOCABULARY, (n - 1,), generator=random).tolist()] for n in (3, 9, longest)]


def check(cell: Cell, rows: Sequence[Sequence[int]] | None = None) -> None:
    """Everything that a cell of the matrix promises."""
    rows = rows or prompts()
    with torch.no_grad():
        answers = [cell.plain_answer(prompt, cell.modulation(i)) for i, prompt in enumerate(rows)]
        check_losses(cell, rows, answers)
        check_generation(cell, rows, answers)
        if cell.dtype == "fp32":
            check_endings(cell, rows, answers)
    check_gradients(cell, rows, answers)


def check_losses(cell: Cell, rows: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
    """In a batch with padding, and alone, log-probabilities and the memory's effect are those of the plain loop."""
    lm, everyone = cell.lm, range(len(rows))
    sizes = [len(answer) for answer in answers]
    together = lm.answer_logits(rows, answers, cell.modulation(*everyone)).float().log_softmax(-1).split(sizes)
    without = lm.answer_logits(rows, answers, None).float().log_softmax(-1).split(sizes)
    for i, (prompt, answer) in enumerate(zip(rows, answers, strict=True)):
        expected = cell.plain_answer_log_probs(prompt, answer, cell.modulation(i))
        alone = lm.answer_logits([prompt], [answer], cell.modulation(i)).float().log_softmax(-1)
        assert cell.distance(together[i], expected) < 1
        assert cell.distance(alone, expected) < 1
        bare = cell.plain_answer_log_probs(prompt, answer, None)
        assert cell.distance(without[i], bare) < 1
        assert cell.distance(bare, expected) > 2


def joining(
    lm: BaseLM, prompts: Sequence[Sequence[int]], modulation: Callable[[int], Modulation | None], new: int
) -> list[Decoded]:
    """Answers to prompts of which each joins those before it while they are being written."""
    batch, begun = ContinuousBatch(), list[Answers]()
    for row, prompt in enumerate(prompts):
        begun.append(lm.begin(batch, [prompt], modulation(row), max_new_tokens=new))
        for _ in range(3):  # each is read, and a token or two are written
            batch.step()
    while batch:
        batch.step()
    return [answers.ended[0] for answers in begun]


def check_generation(cell: Cell, rows: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
    """`generate` and `stream` give the plain loop's tokens, and so do answers that join each other."""
    lm, everyone = cell.lm, range(len(rows))
    whole = cell.modulation(*everyone)
    generated = lm.generate(rows, whole, max_new_tokens=cell.new)
    streamed = ["".join(lm.stream(p, cell.modulation(i), max_new_tokens=cell.new)) for i, p in enumerate(rows)]
    half = lm.generate(rows, whole, max_new_tokens=cell.new, weights=[0.5] * len(rows))
    joined = joining(lm, rows, cell.modulation, cell.new)
    if cell.dtype == "fp32":
        expected = [Numbers().decode(answer) for answer in answers]
        assert generated == streamed == joined == expected
        return
    # Near ties may fall either way, but every token is as good as the best.
    for texts in (generated, streamed, joined):
        for i, (prompt, text) in enumerate(zip(rows, texts, strict=True)):
            tokens = [int(token) for token in text.split()]
            if tokens:
                scores = cell.plain_answer_log_probs(prompt, tokens, cell.modulation(i))
                behind = scores.max(1).values - scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                assert behind.max() <= 4 * cell.tolerance * scores.std()
    assert len(half) == len(rows)


def check_endings(cell: Cell, rows: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
    """An answer that ends leaves its batch, and the others go on as they would have."""
    lm, whole, ends = cell.lm, cell.modulation(*range(len(rows))), list(cell.lm.end_tokens)
    weighted = lm.generate(rows, whole, max_new_tokens=cell.new, weights=[0.5] * len(rows))
    for answer in answers:
        lm.end_tokens = [*ends, answer[len(answer) // 2]]

        def until_end(text: str) -> str:
            tokens = text.split()
            return " ".join(takewhile(lambda token: int(token) not in lm.end_tokens, tokens))

        expected = [until_end(Numbers().decode(each)) for each in answers]
        assert lm.generate(rows, whole, max_new_tokens=cell.new) == expected
        halves = lm.generate(rows, whole, max_new_tokens=cell.new, weights=[0.5] * len(rows))
        assert halves == [until_end(text) for text in weighted]
    lm.end_tokens = ends


def check_gradients(cell: Cell, rows: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
    """Gradients reach phi* of every row and all of the network."""
    phi = cell.phi.clone().requires_grad_(True)
    cell.lm.answer_loss(rows, answers, cell.network(phi)).sum().backward()
    assert phi.grad is not None
    assert phi.grad.isfinite().all()
    assert phi.grad.flatten(1).norm(dim=1).gt(0).all()
    for name, parameter in cell.network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def save_gguf(folder: Path, file: Path, *, without: Sequence[str] = (), **metadata: int) -> Path:
    """Writes the Llama and the tokenizer of a folder as a GGUF file in fp32.

    Args:
        folder: the model folder.
        file: the file to write.
        without: GGUF names of tensors to leave out.
        metadata: metadata in place of the true values, by key.
    """
    import gguf

    lm, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    sizes, state = lm.config, lm.state_dict()
    heads, kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads
    writer = gguf.GGUFWriter(file, "llama")
    numbers = {
        "context_length": sizes.max_position_embeddings, "embedding_length": sizes.hidden_size,
        "block_count": sizes.num_hidden_layers, "feed_forward_length": sizes.intermediate_size,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "vocab_size": sizes.vocab_size,
        "rope.dimension_count": sizes.hidden_size // heads,
    }  # fmt: skip
    for key, value in ({f"llama.{key}": value for key, value in numbers.items()} | metadata).items():
        writer.add_uint32(key, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", sizes.rms_norm_eps)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [tokenizer.convert_ids_to_tokens(i) for i in range(sizes.vocab_size)]
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(sizes.vocab_size)])  # special tokens, then normal ones
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)

    def permuted(weight: Tensor, count: int) -> Tensor:
        # GGUF has the rotated halves of a head side by side.
        return weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)

    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for i in range(sizes.num_hidden_layers):
        names |= {f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for ours, theirs in parts.items()}
    for name, tensor in state.items():
        theirs = names[name.removesuffix(".weight")] + ".weight"
        if "attn_q." in theirs or "attn_k." in theirs:
            tensor = permuted(tensor, heads if "attn_q." in theirs else kv_heads)
        if theirs not in without:
            writer.add_tensor(theirs, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
