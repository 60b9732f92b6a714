"""What a small LM starts from: heads that copy, and embeddings that know words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from mac_rag.errors import ConfigError
from pipelines.initializers.induction_heads import wire_copying
from pipelines.initializers.minilm_embeddings import minilm_embeddings
from pipelines.tasks.pretrain import LMConfig


def llama(width: int = 192, vocabulary: int = 400) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        )
    )


def copied(lm: Any) -> float:
    """Share of the tokens of a second reading that the LM foretells, all but the first."""
    torch.manual_seed(1)
    tokens = torch.randint(lm.config.vocab_size, (4, 60))
    with torch.no_grad():
        said = lm(input_ids=torch.cat([tokens, tokens], 1)).logits[:, 60:-1].argmax(-1)
    return float((said == tokens[:, 1:]).float().mean())


def test_a_wired_lm_copies_before_it_is_trained() -> None:
    lm = llama()
    assert copied(lm) < 0.05
    wire_copying(lm)
    assert copied(lm) > 0.6


def test_copying_needs_slow_rotary_positions() -> None:
    with pytest.raises(ConfigError, match="copying needs two layers and a rope_theta of at least 100,000"):
        LMConfig.parse({"copying": True}, "test")


def test_embeddings_of_minilm_know_words() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "Ġking", "Ġqueen", "Ġtractor", "Ġengine", "King", "Ã"]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    rows = minilm_embeddings(fast, 32)
    assert rows.shape == (7, 32)
    assert torch.allclose(rows.norm(dim=1), torch.ones(7))
    near = functional.normalize(rows) @ functional.normalize(rows).T
    # The same word, and yet not the same.
    assert near[1, [0, 2, 3, 4, 6]].max() < near[1, 5] < 0.999
