"""Loads pretrained models by name or folder, at a pinned revision, in a dtype and quantisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    T5EncoderModel,
)
from transformers.utils import logging

from mac_rag.config import BaseLMConfig, Dtype, EncoderConfig, Quantization
from mac_rag.errors import MACError, ModelLoadError, QuantizationError
from mac_rag.lm.architectures import check_modulation
from mac_rag.lm.devices import DTYPES, DeviceMap, warn_of_slow_numbers
from mac_rag.lm.fetched import local_place
from mac_rag.lm.gguf_files import load_gguf
from mac_rag.lm.minilm import PACKAGED, NoRandomWeights
from mac_rag.lm.model_folders import check_folder, check_size, pinned

INT8_LM = "model.int8.safetensors"  # replaces transformers' own file; see `to_int8`
_ENCODER_ALONE = ("encoder-only", "encoder-pooling")


def resolve(name: str, folder: Path | None) -> str:
    """The place of a model. `./name` becomes a folder inside the checkpoint; any other name is returned unchanged.

    Raises:
        ModelLoadError: for `./name` without a checkpoint, or one that leads out of it.
    """
    if not name.startswith("./"):
        return name
    if folder is None:
        raise ModelLoadError(
            f"{name!r} names a folder inside a checkpoint, but there is no checkpoint here; give a path or a Hub name"
        )
    inside = (folder / name).resolve()
    if not inside.is_relative_to(folder.resolve()):
        raise ModelLoadError(f"{name!r} leads out of the checkpoint {folder}; name a folder inside it")
    return str(inside)


def load_causal_lm(
    config: BaseLMConfig,
    device: torch.device,
    folder: Path | None = None,
    modulation: str | None = None,
    device_map: DeviceMap | None = None,
) -> tuple[nn.Module, Any]:
    """Loads a causal LM and its tokenizer.

    Args:
        config: what to load.
        device: where to load it.
        folder: the checkpoint that `./` names refer to; None without one.
        modulation: the kind of modulation that the LM must carry, checked before weights are loaded; None for none.
        device_map: where the LM's parts go, instead of `device`; None to use `device`.

    Raises:
        ModelLoadError: if there is no such model; if it is no causal LM; if its tokenizer has more tokens than it has
            embeddings; if it cannot carry the modulation.
        QuantizationError: if bitsandbytes is missing.
    """
    warn_of_slow_numbers(config.name, config.dtype, device)
    if config.name in PACKAGED:
        if config.gguf_file is not None:
            raise ModelLoadError(f"{config.name} comes from its package; leave out gguf_file: {config.gguf_file}")
        _require_no_map(config.name, "comes from its package", device_map)
        packaged = _from_package(config.name, PACKAGED[config.name].lm, config, device)
        return packaged, _checked(load_tokenizer(config.name), packaged, config.name)
    place = local_place(resolve(config.name, folder), config.revision)
    if config.gguf_file is not None:
        _require_no_map(config.gguf_file, "is dequantised", device_map)
        return _from_gguf(config, place, device, modulation)
    revision = pinned(place, config.revision)
    architecture = loaded("a causal LM", place, AutoConfig.from_pretrained, revision=revision)
    if modulation is not None:
        check_modulation(architecture, modulation)
    weights = INT8_LM if (Path(place) / INT8_LM).is_file() else None
    described = {"architecture": architecture, "auto_class": AutoModelForCausalLM}
    loaded("a causal LM", place, check_size, revision=revision, weights=weights, **described)
    options = _options(config.dtype, config.quantization, device)
    if weights is not None:
        _require_no_map(place, "is stored as int8", device_map)
        if config.quantization != "none":
            raise ModelLoadError(f"{place} is stored as int8 and cannot be quantised again; set quantization: none")
        model = loaded("a causal LM", place, _int8_lm, dtype=DTYPES[config.dtype])
        return model.to(device), _checked(load_tokenizer(place), model, place)
    if device_map is None:
        model, report = loaded(
            "a causal LM",
            place,
            AutoModelForCausalLM.from_pretrained,
            revision=revision,
            output_loading_info=True,
            **options,
        )
        require_all_weights(place, report)
        model = _placed(model, config.quantization, device)
    else:
        options.pop("device_map", None)
        loader = partial(device_map.load, AutoModelForCausalLM.from_pretrained)
        model = loaded("a causal LM", place, loader, revision=revision, **options)
    if config.quantization == "nf4":
        _require_wide_layers(model)
    return model, _checked(load_tokenizer(place, revision), model, place)


def require_all_weights(place: str, report: Mapping[str, Any]) -> None:
    """Refuses an LM whose files lack some of its weights, because transformers would initialise them at random.

    Args:
        place: where the LM was loaded from.
        report: loading info that `from_pretrained` returns with `output_loading_info`.

    Raises:
        ModelLoadError: for such an LM; the message names some of the weights.
    """
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"{place} lacks {len(missing)} of the LM's weights, such as {', '.join(missing[:3])}; download it again "
            "or save it with all of its weights"
        )


def _require_wide_layers(lm: nn.Module) -> None:
    """Refuses an LM with layers that bitsandbytes cannot compute in nf4 on a CPU."""
    for name, layer in lm.named_modules():
        # It would fail at its first call, with an error about shapes.
        if isinstance(layer, nn.Linear) and layer.out_features == 1 and _runs_in_4_bits_on_a_cpu(layer):
            raise QuantizationError(
                f"{name} has a single output, which bitsandbytes cannot compute in nf4 on a CPU; "
                "set quantization: int8 or none, or use a GPU"
            )


def _runs_in_4_bits_on_a_cpu(layer: nn.Linear) -> bool:
    return layer.weight.dtype is torch.uint8 and layer.weight.device.type == "cpu"


def _require_no_map(name: str, reason: str, device_map: DeviceMap | None) -> None:
    if device_map is not None:
        raise ModelLoadError(f"{name} {reason} and goes to one device; leave out device_map")


def _from_gguf(config: BaseLMConfig, place: str, device: torch.device, modulation: str | None) -> tuple[nn.Module, Any]:
    assert config.gguf_file is not None
    with quiet():
        model, tokenizer = load_gguf(
            place, config.gguf_file, config.revision, dtype=DTYPES[config.dtype], modulation=modulation
        )
    return model.to(device), _checked(tokenizer, model, config.gguf_file)


def _checked(tokenizer: Any, lm: Any, name: str) -> Any:
    """The tokenizer, checked against its LM and with a padding token."""
    check_vocabulary(tokenizer, lm, name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # GPT-2 and Llama have none; padding is always masked
    return tokenizer


def check_vocabulary(tokenizer: Any, model: Any, name: str | None) -> None:
    """Refuses a tokenizer with tokens for which a model has no embeddings.

    Raises:
        ModelLoadError: for such a tokenizer; the message names both sizes.
    """
    highest, size = max(tokenizer.get_vocab().values()), len(model.get_input_embeddings().weight)
    if highest >= size:
        raise ModelLoadError(
            f"the tokenizer of {name!r} has token ids up to {highest}, but the model has embeddings for {size} tokens "
            "only; resize the model's embeddings (resize_token_embeddings) or remove the tokens that were added"
        )


def _int8_lm(place: str, *, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    with NoRandomWeights():
        architecture = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_config(architecture, dtype=dtype, trust_remote_code=trust_remote_code)
    state = from_int8(load_file(Path(place) / INT8_LM))
    differ = dict(model.named_parameters()).keys() ^ state.keys()
    if differ:
        raise ValueError(f"{INT8_LM} does not match config.json: {', '.join(sorted(differ)[:5])}.")
    model.load_state_dict(state, strict=False)  # tied weights have only one of their names
    return model


def load_tokenizer(place: str, revision: str | None = None) -> Any:
    """Loads a tokenizer.

    Raises:
        ModelLoadError: if there is none of that name.
    """
    if place in PACKAGED:
        return PACKAGED[place].tokenizer()
    place = local_place(place, revision)
    return loaded("a tokenizer", place, AutoTokenizer.from_pretrained, revision=pinned(place, revision))


def load_architecture(config: BaseLMConfig) -> Any:
    """Loads the transformers configuration of a base LM, and no weights.

    Raises:
        ModelLoadError: if there is no such model, or for a GGUF file, whose sizes are known only once it is read.
    """
    if config.gguf_file is not None:
        raise ModelLoadError(
            f"the sizes of {config.gguf_file} are known only once it is read; give the folder of the LM in safetensors"
        )
    if config.name in PACKAGED:
        return PACKAGED[config.name].lm().config
    place = local_place(config.name, config.revision)
    return loaded("a causal LM", place, AutoConfig.from_pretrained, revision=pinned(place, config.revision))


def load_backbone(config: EncoderConfig, device: torch.device) -> nn.Module:
    """Loads the pretrained backbone of an amortization network or input encoder.

    Raises:
        ModelLoadError: if there is no such model, or its architecture does not fit the design.
        QuantizationError: if bitsandbytes is missing.
    """
    if config.name is None:
        raise ModelLoadError(
            "the encoder has no name, so it starts from the base LM; give it a name to load a backbone"
        )
    if config.name in PACKAGED:
        backbone: nn.Module = _from_package(config.name, PACKAGED[config.name].backbone, config, device)
        check_design(config, backbone.config)
        return backbone
    # In T5 only the encoder is quantised (appendix A); the decoder stays as it is and is trained.
    skipped = ["decoder"] if config.design == "encoder-decoder" else []
    options = _options(config.dtype, config.quantization, device, skipped)
    place = local_place(config.name, config.revision)
    revision = pinned(place, config.revision)
    architecture = loaded("a model", place, AutoConfig.from_pretrained, revision=revision)
    check_design(config, architecture)
    loader = _backbone_class(config, architecture)
    loaded("a model", place, check_size, revision=revision, architecture=architecture, auto_class=loader)
    model = loaded("a model", place, loader.from_pretrained, revision=revision, **options)
    if config.quantization != "none":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(bool(skipped) and name.startswith("decoder."))
    return _placed(model, config.quantization, device)


def _from_package(
    name: str, load: Callable[[], Any], config: BaseLMConfig | EncoderConfig, device: torch.device
) -> Any:
    if config.quantization != "none":
        raise ModelLoadError(f"{name} comes from its package and cannot be quantised; set quantization: none")
    with quiet():
        return load().to(device, DTYPES[config.dtype])


def empty_backbone(config: EncoderConfig, architecture: Any) -> nn.Module:
    """A backbone of a known architecture with uninitialised weights, which a checkpoint fills.

    Raises:
        ModelLoadError: if the architecture does not fit the design.
    """
    check_design(config, architecture)
    with NoRandomWeights():
        if _backbone_class(config, architecture) is T5EncoderModel:
            t5: nn.Module = T5EncoderModel._from_config(architecture, dtype=DTYPES[config.dtype])
            return t5
        model: nn.Module = AutoModel.from_config(architecture, dtype=DTYPES[config.dtype], trust_remote_code=False)
        return model


def check_design(config: EncoderConfig, architecture: Any) -> None:
    """Refuses a backbone that the design cannot use.

    Raises:
        ModelLoadError: for such a backbone; the message names backbone and design.
    """
    seq2seq = bool(architecture.is_encoder_decoder) or architecture.model_type == "t5"
    if config.design == "encoder-decoder" and not seq2seq:
        fault = "is no encoder-decoder"
    elif config.design == "decoder-only" and seq2seq:
        fault = "is an encoder-decoder"
    elif config.design in _ENCODER_ALONE and seq2seq and architecture.model_type != "t5":
        fault = "has no encoder that can be used alone"
    else:
        return
    raise ModelLoadError(
        f"{config.name!r} ({architecture.model_type}) {fault}, but the design is {config.design}; choose another "
        "backbone or design"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Hides transformers' progress bars, one for every part of a model, within the context."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def list_of_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name and the list of a transformer's layers: the module list as long as its configured number of layers.

    Raises:
        ModelLoadError: for a model without such a list.
    """
    config: Any = model.config
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return name, module
    raise ModelLoadError(f"found no list of decoder layers in {config.model_type}")


def require_gradients(quantization: Quantization, device: torch.device) -> None:
    """Refuses training through quantised weights on a device where their gradients would be wrong.

    Raises:
        QuantizationError: for int8 on any device but a CUDA GPU, for nf4 on one that is no CPU either; bitsandbytes has
            no correct backward pass there.
    """
    if quantization != "none" and device.type not in ("cuda", *(("cpu",) if quantization == "nf4" else ())):
        raise QuantizationError(
            f"training through {quantization} weights needs a CUDA GPU (here: {device.type}); "
            "gradients through bitsandbytes layers are wrong or missing elsewhere. Set quantization: none"
        )


def keep_gradients(network: nn.Module, every: bool = True) -> None:
    """Lets gradients pass through the NF4 weights of a network on a CPU.

    On a CPU with AVX-512 for bf16, bitsandbytes packs them anew when they are first used without gradients, for a
    kernel that has no backward pass, and that fails on rows that are no multiple of its blocks.

    Args:
        every: False for the layers with such rows alone.
    """
    for layer in network.modules():
        packs: Any = layer if getattr(layer, "support_avx512bf16_for_cpu", False) else None
        if packs is not None and (every or packs.in_features % packs.weight.blocksize):
            packs.state_dict()  # brings packed weights back
            packs.support_avx512bf16_for_cpu = False


def _backbone_class(config: EncoderConfig, architecture: Any) -> Any:
    if config.design in _ENCODER_ALONE and architecture.model_type == "t5":
        return T5EncoderModel
    return AutoModel


def _options(
    dtype: Dtype, quantization: Quantization, device: torch.device, skipped: list[str] | None = None
) -> dict[str, Any]:
    options: dict[str, Any] = {"dtype": DTYPES[dtype], "use_safetensors": True}
    if quantization == "none":
        return options
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise QuantizationError(
            f"{quantization} needs bitsandbytes: install mac-rag[quantization], or set quantization: none"
        ) from None
    if quantization == "int8":
        quantized = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped or None)
    else:
        quantized = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=DTYPES[dtype],
            llm_int8_skip_modules=skipped or None,
        )
    return {**options, "quantization_config": quantized, "device_map": {"": str(device)}}


def _placed(model: nn.Module, quantization: Quantization, device: torch.device) -> nn.Module:
    if quantization == "none":
        return model.to(device)
    keep_gradients(model, every=False)
    return model


def loaded(what: str, place: str, loader: Callable[..., Any], **options: Any) -> Any:
    """Calls `loader(place, **options)` without progress bars, and turns its errors into a `ModelLoadError`.

    Code that comes with the model never runs, and the user is never asked to allow it: the folder is checked first, and
    the loader gets `trust_remote_code=False`.

    Args:
        what: the kind of thing that is loaded, for the message.
        place: name or folder.
        loader: the function to call.
        options: further arguments of the function.

    Raises:
        ModelLoadError: if it cannot be loaded.
    """
    check_folder(Path(place))
    try:
        with quiet():
            return loader(place, **options, trust_remote_code=False)
    except MACError:
        raise
    except Exception as error:  # the loaders raise all kinds of errors on unexpected files
        detail = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelLoadError(
            f"cannot load {what} from {place!r}: {detail[0]} "
            "Give the name of a model on the Hub or the path of a model folder."
        ) from error


def keep_first_layers(backbone: nn.Module, count: int) -> None:
    """Drops all layers of a backbone except the first `count`.

    Raises:
        ModelLoadError: for a backbone of fewer layers.
    """
    config: Any = backbone.config
    if count > config.num_hidden_layers:
        raise ModelLoadError(f"layers is {count}, but {config.model_type} has {config.num_hidden_layers}; give fewer")
    name, layers = list_of_layers(backbone)
    parent, _, last = name.rpartition(".")
    setattr(backbone.get_submodule(parent), last, layers[:count])
    describe_first_layers(config, count)


def describe_first_layers(config: Any, count: int) -> None:
    """Changes a transformers configuration to describe the first `count` layers only."""
    for field, value in vars(config).items():
        # A list with an entry for each layer, such as `layer_types`; transformers checks its length.
        if "layer" in field and isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(config, field, value[:count])
    config.num_hidden_layers = count


def load_first_layers(config: BaseLMConfig, count: int | None, device: torch.device) -> nn.Module:
    """The first layers of a base LM without its head, in fp32, whatever dtype and quantisation the LM is used in.

    Args:
        config: the base LM, in safetensors in a folder or on the Hub.
        count: number of layers; None for all.
        device: device of the layers.

    Raises:
        ModelLoadError: if there is no such model, it has fewer layers, or its files hold quantised weights only.
    """
    place = local_place(config.name, config.revision)
    revision = pinned(place, config.revision)
    architecture = loaded("a causal LM", place, AutoConfig.from_pretrained, revision=revision)
    if getattr(architecture, "quantization_config", None) is not None:
        raise ModelLoadError(
            f"{place} holds quantised weights, from which an encoder cannot start; give the encoder a name, or base_lm "
            "a folder with the original weights"
        )
    if count is not None:
        if count > architecture.num_hidden_layers:
            raise ModelLoadError(
                f"layers is {count}, but {architecture.model_type} has {architecture.num_hidden_layers}; give fewer"
            )
        describe_first_layers(architecture, count)
    described = {"architecture": architecture, "auto_class": AutoModel}
    loaded("a model", place, check_size, revision=revision, **described)
    loader = partial(AutoModel.from_pretrained, config=architecture, dtype=torch.float32, use_safetensors=True)
    shown = logging.get_verbosity()
    logging.set_verbosity_error()  # otherwise transformers lists all layers that are left out
    try:
        model, report = loaded("a model", place, loader, revision=revision, output_loading_info=True)
    finally:
        logging.set_verbosity(shown)
    require_all_weights(place, report)
    layers: nn.Module = model.to(device)
    return layers


# Weights stored as 8-bit integers: matrices with one scale for each row or each column, a quarter of fp32's size.
# Loading converts them back to floating-point numbers, so only storage changes: the model that runs is an ordinary one
# whose weights were rounded once (to nearest, symmetric; the largest weight of a row, or column, becomes 127).

_SCALE = "int8_scale:"  # prefix of a weight's name that gives the name of its scales


def to_int8(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state with its floating-point tensors of two or more dimensions as int8, and with their scales.

    The scales are `[..., 1]` or `[..., 1, columns]`, whichever loses less. If a few columns are much larger than the
    rest, as in BERT's position embeddings, they would determine the scale of every row.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.ndim < 2 or not tensor.is_floating_point():
            result[name] = tensor.contiguous()
            continue
        values = tensor.float()
        choices = [_rounded(values, dim) for dim in (-1, -2)]
        losses = [float((whole * scale - values).square().sum()) for whole, scale in choices]
        result[name], result[_SCALE + name] = choices[losses.index(min(losses))]
    return result


def _rounded(values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Integers, and their scales: one for all values along `dim`."""
    scale = values.abs().amax(dim, keepdim=True) / 127
    # If all values are zero, the scale is zero and must not divide.
    return (values / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8), scale


def from_int8(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state in float32 from the result of `to_int8`; a state without int8 weights stays as it is.

    Raises:
        ValueError: for scales that do not fit their weights.
    """
    for name, tensor in stored.items():
        scale = stored.get(_SCALE + name)
        if scale is not None and (scale.ndim != tensor.ndim or any(map(_differ, scale.shape, tensor.shape))):
            raise ValueError(f"{name} is {list(tensor.shape)}, and its scales are {list(scale.shape)}")
    return {
        name: tensor.float() * stored[_SCALE + name] if _SCALE + name in stored else tensor
        for name, tensor in stored.items()
        if not name.startswith(_SCALE)
    }


def _differ(scales: int, weights: int) -> bool:
    return scales not in (1, weights)
