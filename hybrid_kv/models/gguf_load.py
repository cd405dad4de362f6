"""Loads GGUF files: packed as they lie, or unpacked to plain weights by transformers.

A file's weights of 4 to 8 bits stay packed on a CPU, mapped and not read. `dequantize=True` unpacks
them to layers of transformers' own, which takes several times the memory of the file.
"""

from __future__ import annotations

import re
from typing import Any
from warnings import warn

import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import (
    TOKENIZER_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    __version__,
)

from hybrid_kv.errors import BackendUnavailable, ConfigError, GgufWarning, ModelNotFoundError
from hybrid_kv.models.checkpoint import one_sentence, read_model
from hybrid_kv.models.gguf_conversion import conversion_of, gguf_config
from hybrid_kv.models.gguf_file import GgufFile, open_gguf
from hybrid_kv.models.gguf_mixtures import GPT_OSS, is_mixture
from hybrid_kv.models.gguf_model import (
    GgufOptions,
    PackedPlan,
    check_package,
    empty_model,
    fill,
    plan_of,
)
from hybrid_kv.models.weight_kinds import StoredWeight, dtype_name, mib
from hybrid_kv.ops.native.library import engine_state
from hybrid_kv.ops.native.linear import PACKED_KINDS
from hybrid_kv.runtime import check_weights_memory

try:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
except ImportError:  # before transformers 5.24
    GGUF_PRE_TOKENIZER_SPLITS = {}


def read_gguf_config(name: str, path: str) -> PreTrainedConfig:
    """The configuration of a file's model.

    Args:
        name: what the user called the model; for messages.

    Raises:
        ModelNotFoundError: no such file, or it is none that can be read.
    """
    return gguf_config(name, _file(name, path))


def read_gguf_tokenizer(name: str, path: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a file; arguments and errors as `read_gguf_config`."""
    file = _file(name, path)
    _check_vocabulary(name, file)
    # AutoTokenizer would take the vocabulary apart twice, once for the configuration.
    kind: Any = TOKENIZER_MAPPING.get(type(gguf_config(name, file)), None)
    if kind is None or not issubclass(kind, PreTrainedTokenizerFast):
        kind = PreTrainedTokenizerFast
    with one_sentence(name, "give its tokenizer"):
        made = kind.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
        if file.values.get("tokenizer.ggml.pre") in _DIGITS_APART:
            _split_digits(made.backend_tokenizer)
    return made  # type: ignore[no-any-return]


def _check_vocabulary(name: str, file: GgufFile) -> None:
    """Raises ModelNotFoundError where transformers would take gpt-oss's words apart as GPT-2's."""
    kind = file.values.get("tokenizer.ggml.pre")
    if file.architecture == GPT_OSS and kind not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ModelNotFoundError(
            f"the vocabulary of '{name}' is of kind '{kind}', which transformers {__version__} "
            "does not read from GGUF files; take a file of kind 'gpt-4o', run pip install -U "
            "transformers (5.24 or later), or pass the checkpoint's tokenizer"
        )


_DIGITS_APART = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva"}
)
"""Vocabularies of llama.cpp's that take digits one by one before anything else."""


def _split_digits(backend: Tokenizer) -> None:
    """Takes digits apart where transformers has a split by words alone."""
    if isinstance(words := backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])


def read_gguf(
    name: str,
    path: str,
    device: torch.device,
    dtype: torch.dtype | None,
    quantization_config: Any,
    options: GgufOptions,
) -> PreTrainedModel:
    """The model of a GGUF file, which computes in bfloat16 if `dtype` is None.

    Arguments and errors as `read_model`; what transformers cannot read is an architecture as well.

    Raises:
        ConfigError: packed weights on a device other than the CPU, or a configuration for others.
        BackendUnavailable: there is no engine to multiply packed weights.

    Warns:
        GgufWarning: how much memory weights take that were unpacked.
    """
    file, dtype = _file(name, path), dtype or torch.bfloat16
    config = gguf_config(name, file)
    if quantization_config is not None:
        _check_for_transformers(name, file, options)
        return _read_for(quantization_config, name, file, config, device, dtype)
    if file.is_packed and not options.dequantize:
        _check_can_stay_packed(name, config, str(device), dtype)
    model = empty_model(name, config, dtype)
    with one_sentence(name, "be loaded"):
        conversion = conversion_of(file, model)
        plan = plan_of(file, model, conversion, dequantize=options.dequantize)
        if not options.dequantize:
            _check_kinds(name, plan)
        if device.type == "cpu":
            check_weights_memory(plan.num_bytes(dtype), name)
        _tell_of_unpacked(name, file, plan, dtype)
        _tell_of_ignored(name, model, plan)
        fill(name, model, plan, conversion, dtype, device, exact=options.exact_products)
    return model.to(device).eval()  # type: ignore[no-any-return, arg-type]


def packed_weights_of(
    name: str, path: str, dtype: torch.dtype, device: str | None
) -> list[StoredWeight]:
    """Sizes of a file's weights when they stay packed.

    Args:
        dtype: of what cannot stay packed.
        device: where the model would run; None where that does not matter.

    Raises:
        ConfigError, BackendUnavailable: they cannot stay packed there.
    """
    file = _file(name, path)
    config = gguf_config(name, file)
    if file.is_packed and device is not None:
        _check_can_stay_packed(name, config, device, dtype)
    model = empty_model(name, config, dtype)
    conversion = conversion_of(file, model)
    return list(plan_of(file, model, conversion).stored(conversion, dtype))


def _file(name: str, path: str) -> GgufFile:
    check_package(name)
    return open_gguf(path)


def _check_can_stay_packed(
    name: str, config: PreTrainedConfig, device: str, dtype: torch.dtype
) -> None:
    """Raises ConfigError or BackendUnavailable where nothing multiplies packed weights."""
    unpacked = f"dequantize=True for weights in {dtype_name(dtype)}"
    if device != "cpu":
        raise ConfigError(
            f"the weights of '{name}' are packed, which is for the CPU, got device '{device}'; "
            "pass device='cpu', take the model as a checkpoint with weights='int4', or pass "
            f"{unpacked}, {mib(_plain_bytes(config, dtype))}"
        )
    if (state := engine_state()).isa is None:
        raise BackendUnavailable(
            f"the weights of '{name}' are packed, which needs the native engine ({state.detail}); "
            f"pass {unpacked}, {mib(_plain_bytes(config, dtype))}"
        )


def _check_kinds(name: str, plan: PackedPlan) -> None:
    for tensor in plan.unpacked:
        if tensor.kind not in PACKED_KINDS:
            raise ModelNotFoundError(
                f"tensor '{tensor.name}' of model '{name}' is of kind {tensor.kind}, and only "
                f"{', '.join(PACKED_KINDS)} are multiplied as they lie; take a file in one of "
                "these, or pass dequantize=True"
            )


def _tell_of_unpacked(name: str, file: GgufFile, plan: PackedPlan, dtype: torch.dtype) -> None:
    """Warns of memory that unpacked weights take."""
    if not plan.unpacked:
        return
    if not plan.packed:
        _warn(
            f"the weights of '{name}' are unpacked from GGUF to {dtype_name(dtype)} and take "
            f"{mib(plan.num_bytes(dtype))}, {mib(file.num_bytes)} in the file"
        )
        return
    packed = sum(tensor.data.nbytes for tensor in plan.unpacked)
    taken = sum(torch.Size(tensor.shape).numel() for tensor in plan.unpacked) * dtype.itemsize
    first = plan.unpacked[0]
    _warn(
        f"{len(plan.unpacked)} tensors of '{name}' ({first.name} of kind {first.kind}, for one) "
        f"cannot stay packed in this architecture: in {dtype_name(dtype)} they take {mib(taken)}, "
        f"{mib(packed)} in the file"
    )


_READ_APART = re.compile(r"rope_|.*\.attn_rot_embd\.")
"""Tensors that a configuration is made from, or that say what it says."""
_OF_LAYER = re.compile(r"blk\.(\d+)\.")


def _tell_of_ignored(name: str, model: PreTrainedModel, plan: PackedPlan) -> None:
    """Warns of tensors that the model has no place for, but of layers behind its last one: those
    that foresee further tokens.
    """
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    left = [
        tensor.name
        for tensor in plan.ignored
        if not _READ_APART.match(tensor.name)
        and not ((found := _OF_LAYER.match(tensor.name)) and int(found[1]) >= layers)
    ]
    if left:
        _warn(
            f"{len(left)} tensors of '{name}' ({left[0]}, for one) have no place in "
            f"{type(model).__name__} and are left out: its answers may not be the model's"
        )


# Packed by others -------------------------------------------------------------------------------


def _check_for_transformers(name: str, file: GgufFile, options: GgufOptions) -> None:
    """Raises ConfigError unless weights can be unpacked for a library that packs them again."""
    if is_mixture(file):
        raise ConfigError(
            f"model '{name}' is a GGUF file of a mixture that transformers does not read, which a "
            "quantization_config asks for; leave it out, or take the checkpoint"
        )
    if file.is_packed and not options.dequantize:
        raise ConfigError(
            f"the weights of '{name}' are packed already, got a quantization_config; leave it out, "
            "or add dequantize=True"
        )
    if file.num_parts > 1:
        raise ConfigError(
            f"model '{name}' is split into {file.num_parts} files, which transformers does not "
            "read; join them with llama.cpp's llama-gguf-split --merge, or leave out "
            "quantization_config"
        )


def _read_for(
    quantization_config: Any,
    name: str,
    file: GgufFile,
    config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> PreTrainedModel:
    """Takes transformers' own way from a file to the modules of a library."""
    where: dict[str, Any] = {"gguf_file": file.path.name, "config": config}
    folder = str(file.path.parent)
    return read_model(name, folder, device, dtype, quantization_config, **where)


def _plain_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of all weights in a dtype, without making them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(int(weight.numel()) for weight in model.parameters()) * dtype.itemsize


def _warn(text: str) -> None:
    warn(text, GgufWarning, stacklevel=6)  # whoever called hybrid_kv.load
