"""A prefix behind an attention sink: what the LM keeps of a text, handed in as a memory, is that text in front."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from mac_rag.errors import ModelLoadError
from mac_rag.lm.attention_sink import first_tokens, key_rotation, make_attention_sink
from mac_rag.nn.modulation import PrefixModulation
from tests.lm.conftest import InTable
from tests.lm.helpers import ARCHITECTURES, DTYPES, LEARNED_POSITIONS, ROTATIONS, SCALINGS, TOKENS, Cell, check, prompts

TEXTS = [[11, 57, 23, 8], [99, 98, 97, 96], [300, 4, 5, 301]]  # each as long as there are memory tokens
ANSWERS = [[30, 31, 2], [40, 2], [50, 51, 52, 53]]


def remembered(cell: Cell, text: list[int], offset: int) -> PrefixModulation:
    """The LM's own keys and values of a text as a memory.

    The text has stood `offset` positions further on, and its keys are turned back from there: so a rotation that leaves
    everything as it is does not pass.
    """
    lm, network = cell.lm, cell.network
    ids = torch.tensor([[*first_tokens(lm), *text]])
    positions = offset + torch.arange(ids.shape[1])
    cache = DynamicCache()
    lm.model(input_ids=ids, position_ids=positions[None], past_key_values=cache, use_cache=True)
    keys, values = (torch.stack([layer[i][0, :, -TOKENS:] for layer in cache]) for i in (0, 1))
    before = key_rotation(lm.model, positions[-TOKENS:].tolist(), lm.context_window).inverse(keys)
    return PrefixModulation(network.sink(torch.stack([before, values], 1)[None]))


def in_matrix(usual: bool) -> Any:
    """Marks of a case that only the matrix runs, unless it is usual."""
    return [] if usual else [pytest.mark.matrix]


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(
            pytest.param(name, {}, id=name, marks=in_matrix(name in ("gpt2", "llama", "gemma3_text", "cohere2")))
            for name in [*ARCHITECTURES, *ROTATIONS]
        ),
        *(
            pytest.param("llama", {"rope_parameters": scaling}, id=scaling["rope_type"], marks=pytest.mark.matrix)
            for scaling in SCALINGS
        ),
    ],
)
def test_a_text_as_a_memory_is_that_text_in_front(name: str, changes: dict[str, Any]) -> None:
    cell = Cell.of(name, "sink", "fp32", **changes)
    offset = 0 if name in LEARNED_POSITIONS else 7
    memories = [remembered(cell, text, offset) for text in TEXTS]
    together = PrefixModulation(torch.cat([memory._keys_values for memory in memories]))
    sizes = [len(answer) for answer in ANSWERS]
    found = cell.lm.answer_logits(prompts(), ANSWERS, together).log_softmax(-1).split(sizes)
    for i, (prompt, answer) in enumerate(zip(prompts(), ANSWERS, strict=True)):
        front, other = ([*first_tokens(cell.lm), *text] for text in (TEXTS[i], TEXTS[i - 1]))
        answered = slice(-len(answer) - 1, -1)
        expected = cell.plain_log_probs([*front, *prompt, *answer], None, front=len(front))[answered]
        assert cell.distance(found[i], expected) < 1
        assert cell.distance(cell.plain_log_probs([*other, *prompt, *answer], None)[answered], expected) > 2


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=in_matrix(name in ("mistral", "smollm3") and dtype == "fp32"))
        for name in ARCHITECTURES
        for dtype in DTYPES
    ],
)
def test_every_path_of_a_prefix_behind_a_sink(name: str, dtype: str, in_table: InTable) -> None:
    in_table(name, "sink", dtype)
    check(Cell.of(name, "sink", dtype))


def lm_of(name: str, **config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, vocab_size=400, **config)).eval()


class TestRefusals:
    def test_keys_that_are_turned_without_a_rotary_embedding(self) -> None:
        lm = lm_of("gptj", n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=128)
        with pytest.raises(ModelLoadError, match=r"gptj rotates the keys of layer 0 .*attention_sink to false"):
            key_rotation(lm, [1, 2], 128)

    def test_keys_that_are_changed_after_they_are_turned(self) -> None:
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        lm = lm_of("hunyuan_v1_dense", **sizes, num_key_value_heads=2, head_dim=16)
        key_rotation(lm, [1, 2], 128)  # the weights that scale its keys are ones at first
        torch.nn.init.uniform_(lm.model.layers[1].self_attn.key_layernorm.weight, 0.2, 2)
        with pytest.raises(ModelLoadError, match="rotates the keys of layer 1"):
            key_rotation(lm, [1, 2], 128)

    def test_keys_that_are_turned_differently_in_long_texts(self) -> None:
        factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        lm = lm_of(
            "phi3", hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
            original_max_position_embeddings=100, max_position_embeddings=400,
            rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
        )  # fmt: skip
        short = key_rotation(lm, [1, 2], 100)
        with pytest.raises(ModelLoadError, match=r"phi3 .*texts of more than 100 tokens.* set context_window"):
            key_rotation(lm, [1, 2], 101)
        assert torch.equal(key_rotation(lm, [1, 2], 100).cos, short.cos)  # a long text has left no trace


def test_an_lm_with_biases_for_distances_turns_nothing() -> None:
    keys = torch.randn(2, 4, 3, 16)
    rotation = key_rotation(lm_of("bloom", hidden_size=64, n_layer=2, n_head=4), [1, 2, 3], 128)
    assert torch.equal(rotation(keys), keys)


def test_the_sink_is_the_token_in_front_of_every_text() -> None:
    cell = Cell.of("llama", "sink", "fp32")
    assert list(first_tokens(cell.lm)) == [1]  # <s>
    cache = cell.lm.model(torch.tensor([[1, 30]]), use_cache=True).past_key_values
    expected = torch.stack([torch.stack([layer[0][0, :, :1], layer[1][0, :, :1]]) for layer in cache])
    torch.testing.assert_close(make_attention_sink(cell.lm, TOKENS, None).keys_values, expected)
    assert cell.modulation(0).prefix_length == 1 + TOKENS
