"""Conversion of a GGUF file to what transformers has: configuration, names of tensors, values.

llama.cpp writes some matrices in another order of rows than transformers has them, some norms less
one, some kernels flat. transformers knows all of it, for whole matrices of numbers. Here its own
functions are applied to numbers of rows: where these come out as rows in another order, a packed
matrix can be put into that order by whole rows; where they do not, its values are unpacked first.

transformers knows this in two forms, of which some architectures have the newer one. Of mixtures
that it does not know, `gguf_mixtures` has the older one.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from hybrid_kv.errors import ModelNotFoundError
from hybrid_kv.models.checkpoint import one_sentence, read_config
from hybrid_kv.models.gguf_file import MAGIC, GgufFile, GgufTensor
from hybrid_kv.models.gguf_mixtures import GPT_OSS, PROCESSORS, is_mixture, mixture_config

try:
    from transformers.integrations.gguf.gguf_config_mapping import (
        GGUF_CONFIG_ARCHS,
        get_gguf_config,
    )
    from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
    from transformers.integrations.gguf.utils import get_gguf_conversion_mapping
except ImportError:  # before transformers 5.24
    GGUF_ARCHS, GGUF_CONFIG_ARCHS = {}, {}

_VOCABULARY = "tokenizer.ggml.tokens"
_TEXT_LIMIT = 2**16
"""Bytes of a key that the configuration could be read from; a vocabulary has more."""
_OF_PAIR = re.compile(r"(blk\.\d+\.ffn_)(gate|up)(_exps\..*)")
_DEPTH = 2
"""Modules in modules whose names a file may leave out, as those of `transformer.` in Bloom's."""


# The configuration ------------------------------------------------------------------------------


def gguf_config(name: str, file: GgufFile) -> PreTrainedConfig:
    """The configuration of a file's model.

    Raises:
        ModelNotFoundError: transformers does not know the architecture, or misses something.
    """
    layers = file.values.get(f"{file.architecture}.block_count", 0)
    if not isinstance(layers, int) or layers > len(file.tensors):
        count = f"{layers:,}" if isinstance(layers, int) else f"'{layers}'"
        raise ModelNotFoundError(
            f"model '{name}' cannot be loaded: its header counts {count} layers and "
            f"{len(file.tensors):,} tensors; check that the download is complete"
        )
    _check_pairs(name, file)
    if is_mixture(file):
        with one_sentence(name, "be loaded"):
            config = AutoConfig.for_model(**mixture_config(name, file))
    elif file.architecture in GGUF_CONFIG_ARCHS:
        config = _by_keys(name, file)
    else:
        with TemporaryDirectory() as folder:
            short = Path(folder, "short.gguf")
            short.write_bytes(_without_vocabulary(file))
            config = read_config(name, folder, gguf_file=short.name)
        config.name_or_path = str(file.path)
    with one_sentence(name, "be loaded"):
        _set_attention(name, file, config.get_text_config(decoder=True))
    return config


def _check_pairs(name: str, file: GgufFile) -> None:
    """Raises ModelNotFoundError where experts have a gate and not what it gates, or the reverse:
    transformers has both in one tensor, of which it would leave a half zero.
    """
    for tensor in file.tensors:
        found = _OF_PAIR.fullmatch(tensor)
        other = found and f"{found[1]}{'up' if found[2] == 'gate' else 'gate'}{found[3]}"
        if other and other not in file.tensors:
            raise ModelNotFoundError(
                f"model '{name}' cannot be loaded: it has the tensor '{tensor}' and no '{other}'; "
                "check that the download is complete"
            )


def _by_keys(name: str, file: GgufFile) -> PreTrainedConfig:
    with one_sentence(name, "be loaded"):
        found: Any = get_gguf_config(dict(file.values), tuple(file.tensors))
        return AutoConfig.for_model(**found)


_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27B."""
_SCALING = "rope.scaling."
_SCALINGS = (
    *("type", "factor", "attn_factor", "original_context_length", "finetuned"),
    *("yarn_beta_fast", "yarn_beta_slow"),
)


def _set_attention(name: str, file: GgufFile, config: PreTrainedConfig) -> None:
    """Gives a configuration what transformers leaves out: the rule for positions beyond those of
    training, how many channels are turned, and Gemma's scale.

    As llama.cpp has it: the rule is for layers without a window, and Gemma's largest model, which
    it knows by the number of layers, has a scale of its own.
    """
    rule = _rope_rule(name, file, getattr(config, "max_position_embeddings", 0))
    if rule.get("rope_type") == "longrope":
        config.original_max_position_embeddings = rule["original_max_position_embeddings"]
    own = getattr(config, "rope_parameters", None) or {}
    if rule:
        own.get("full_attention", own).update(rule)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = file.values.get(f"{file.architecture}.rope.dimension_count", 0)
    if turned and turned != int(width * own.get("partial_rotary_factor", 1.0)):
        own["partial_rotary_factor"] = turned / width
    if (largest := _LARGEST_GEMMA.get(file.architecture)) is not None:
        is_largest = config.num_hidden_layers == largest
        per_head = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = per_head if is_largest else width


def _rope_rule(name: str, file: GgufFile, context: int) -> dict[str, Any]:
    """The rule, in transformers' words; empty for none.

    Args:
        context: tokens of the longest context, those of training where the file does not say.

    Raises:
        ModelNotFoundError: nothing here knows the rule.
    """
    begin = f"{file.architecture}.{_SCALING}"
    keys = [key for key in file.values if key.startswith(begin)]
    told: dict[str, Any] = {key.removeprefix(begin): file.values[key] for key in keys}
    original = {"original_max_position_embeddings": told.get("original_context_length", context)}
    tensors = [file.tensors.get(f"rope_factors_{length}.weight") for length in ("long", "short")]
    long, short = (None if one is None else one.values().tolist() for one in tensors)
    if long is not None and short is not None:
        rule = {"rope_type": "longrope", "long_factor": long, "short_factor": short, **original}
        given = {"attention_factor": told["attn_factor"]} if "attn_factor" in told else {}
        return rule | given
    before = file.values.get(f"{file.architecture}.rope.scale_linear", 1.0)
    kind, factor = told.get("type", "linear"), told.get("factor", before)
    if kind == "none" or factor in (0.0, 1.0):
        return {}
    unknown = "".join(f" with {key}" for key in told if key not in _SCALINGS)
    if kind not in ("linear", "yarn") or unknown:
        raise ModelNotFoundError(
            f"model '{name}' stretches its positions by '{kind}'{unknown}, which is not read from "
            "GGUF files; take the model as a checkpoint"
        )
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    # As gpt-oss was trained. llama.cpp takes whole numbers there too.
    bounds = {"truncate": False} if file.architecture == GPT_OSS else {}
    betas = {beta: told.get(f"yarn_{beta}") for beta in ("beta_fast", "beta_slow")}
    attention = told.get("attn_factor", 1.0) * (1 + 0.1 * math.log(factor))
    rule = {"rope_type": kind, "factor": factor, "attention_factor": attention}
    return rule | original | betas | bounds


def _without_vocabulary(file: GgufFile) -> bytes:
    """A file with the same keys and the names of the same tensors, in some KiB.

    transformers' reader takes a vocabulary apart in seconds, of which a configuration has use for
    the size alone.
    """
    keys = [file.raw(key) for key in file.values if len(file.raw(key)) <= _TEXT_LIMIT]
    size, count = f"{file.architecture}.vocab_size", file.values.get(_VOCABULARY)
    if size not in file.values and isinstance(count, int):
        keys.append(_text(size) + struct.pack("<II", 4, count))
    # One number for all tensors: who reads a configuration looks at their names only.
    tensors = [_text(name) + struct.pack("<IQIQ", 1, 1, 0, 0) for name in file.tensors]
    head = MAGIC + struct.pack("<IQQ", 3, len(tensors), len(keys))
    body = b"".join((head, *keys, *tensors))
    return body.ljust(-(-len(body) // 2**12) * 2**12 + 2**12, b"\0")


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


# Tensors ----------------------------------------------------------------------------------------


class RowOrder(NamedTuple):
    """Order of a matrix: which packed row becomes which row of the model.

    rows: by row of the model, which row of the file it is; None for the same. columns: by column of
    the file, which input of the model it is for; None for the same.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None


class Conversion(Protocol):
    """From the tensors of a file to those of its model."""

    def name_of(self, tensor: GgufTensor) -> str | None:
        """The model's name for a tensor; None where it has no use for it."""
        ...

    def row_order(self, tensor: GgufTensor) -> RowOrder | None:
        """The order of a matrix's rows; None where its rows become something else."""
        ...

    def stacked_rows(self, tensor: GgufTensor) -> range | None:
        """By row of a stack [E, N, K], which output of the model's matrix it is; None where it
        becomes something else.
        """
        ...

    def add_values(self, tensor: GgufTensor, values: MutableMapping[str, Tensor]) -> None:
        """Puts what becomes of a tensor's values to those of the others, by the model's names."""
        ...


def conversion_of(file: GgufFile, model: PreTrainedModel) -> Conversion:
    """Transformers' knowledge of a file's architecture; of `model` the names count."""
    if file.architecture in GGUF_ARCHS:
        return _ByConverters(file, model)
    return _ByProcessor(file, model)


class _ByProcessor:
    """One function of transformers for all tensors of an architecture; most have this."""

    def __init__(self, file: GgufFile, model: PreTrainedModel) -> None:
        known: Any = PROCESSORS if is_mixture(file) else TENSOR_PROCESSORS
        kind = known.get(file.architecture, TensorProcessor)
        self._processor = kind(config=model.config.to_dict())
        self._names = _names(file, model, self._processor)

    def name_of(self, tensor: GgufTensor) -> str | None:
        # Stacked experts are no modules, and have no '.weight' in the model.
        return self._names.get(tensor.name) or self._names.get(tensor.name.removesuffix(".weight"))

    def row_order(self, tensor: GgufTensor) -> RowOrder | None:
        if len(tensor.shape) != 2:
            return None
        count, width = tensor.shape
        # One column does for what moves whole rows; who looks at the columns needs all of them.
        for columns in (1, width):
            numbers = np.broadcast_to(np.arange(count)[:, None], (count, columns))
            with suppress(Exception):  # of whatever a shape that does not fit leads to
                name, made = self._process(tensor.name, numbers, {})
                return None if name is None else _order_in(made, numbers)
        return None

    def stacked_rows(self, tensor: GgufTensor) -> range | None:
        numbers, values = _numbers_of(tensor), dict[str, Tensor]()
        with suppress(Exception):  # of whatever a shape that does not fit leads to
            name, made = self._process(tensor.name, numbers.numpy(), values)
            found = torch.from_numpy(made) if name is not None else values[self.name_of(tensor)]  # type: ignore[index]
            return _rows_in(found, numbers)
        return None

    def add_values(self, tensor: GgufTensor, values: MutableMapping[str, Tensor]) -> None:
        source = tensor.values()
        plain = source.float() if source.dtype == torch.bfloat16 else source  # numpy has none
        try:
            name, made = self._process(tensor.name, plain.numpy(), values)
        except (RuntimeError, ValueError) as error:  # of a shape that does not fit
            raise ModelNotFoundError(
                f"tensor '{tensor.name}' is {list(tensor.shape)}, which does not fit: {error}; "
                "check that the download is complete"
            ) from error
        target = None if name is None else self._names.get(name)
        if target is not None:
            values[target] = torch.from_numpy(np.ascontiguousarray(made)).to(source.dtype)

    def _process(
        self, name: str, weights: np.ndarray[Any, Any], values: MutableMapping[str, Tensor]
    ) -> tuple[str | None, np.ndarray[Any, Any]]:
        """The name that the processor gives, None where it has put the values where they belong."""
        done = self._processor.process(
            weights=weights,
            name=name,
            tensor_key_mapping=self._names,
            parsed_parameters={"tensors": values},
        )
        return done.name, done.weights


def _order_in(made: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any]) -> RowOrder | None:
    """The order of rows, from what became of a matrix whose values are the numbers of its rows."""
    if made.shape != numbers.shape:
        return None
    order = made[:, 0]
    if (made != order[:, None]).any() or (np.sort(order) != numbers[:, 0]).any():
        return None
    same = bool((order == numbers[:, 0]).all())
    return RowOrder(rows=None if same else torch.from_numpy(np.ascontiguousarray(order)))


def _numbers_of(stack: GgufTensor) -> Tensor:
    """A column of numbers from 1 on for the rows of a stack, [E, N, 1]."""
    experts, rows = stack.shape[:2]
    return torch.arange(1, experts * rows + 1).view(experts, rows, 1)


def _rows_in(made: Tensor, numbers: Tensor) -> range | None:
    """Where the numbers of a stack's rows have come to lie, in their order and beside zeros."""
    whole = made if made.shape[2] == 1 else made.mT  # outputs are columns of some models' matrices
    found = whole[0, :, 0].nonzero().flatten()[:2].tolist()
    if not found:
        return None
    step = found[1] - found[0] if len(found) > 1 else 1
    rows = range(found[0], found[0] + step * numbers.shape[1], step)
    beside = whole.count_nonzero() == numbers.numel()
    same = beside and torch.equal(whole[:, rows.start : rows.stop : step].to(numbers), numbers)
    return rows if same else None


class _Names(NamedTuple):
    """A stand-in for a model, with no more than transformers asks for when it maps names.

    It would take seconds to ask a model itself, down to its last module.
    """

    config: PreTrainedConfig
    keys: Iterable[str]

    def state_dict(self) -> Iterable[str]:
        return self.keys

    def named_children(self) -> tuple[()]:
        return ()


def _names(file: GgufFile, model: PreTrainedModel, processor: Any) -> dict[str, str]:
    """The model's names by the file's, of outer modules before those of inner ones."""
    found: dict[str, str] = {}
    keys = list(model.state_dict())
    for prefix in _prefixes(model):
        inner = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
        asked, kind = _Names(model.config, inner), file.architecture if is_mixture(file) else None
        found = get_gguf_hf_weights_map(asked, processor, kind, qual_name=prefix) | found
        if file.tensors.keys() <= found.keys():
            break
    return found


def _prefixes(model: nn.Module) -> Iterator[str]:
    modules = [name for name, module in model.named_modules() if any(module.children())]
    depths = {name: name.count(".") + 1 for name in modules if name}
    yield ""
    yield from (
        f"{name}." for name in sorted(depths, key=depths.__getitem__) if depths[name] <= _DEPTH
    )


class _ByConverters:
    """transformers' newer knowledge: a list of renamings, and of operations on tensors."""

    def __init__(self, file: GgufFile, model: PreTrainedModel) -> None:
        mapping = deepcopy(get_gguf_conversion_mapping(file.architecture, model.config))
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        renamings: list[Any] = [
            entry for entry in mapping if not isinstance(entry, WeightConverter)
        ]
        known = set(model.state_dict())
        self._names: dict[str, str] = {}
        self._by_name: dict[str, tuple[Any, str]] = {}
        for name in file.tensors:
            target, pattern = rename_source_key(name, renamings, converters)
            if target not in known:
                continue
            self._names[name] = target
            for converter in converters:
                if pattern is not None and pattern in converter.source_patterns:
                    self._by_name[name] = converter, pattern
        self._gathered: dict[str, dict[str, Tensor]] = {}

    def name_of(self, tensor: GgufTensor) -> str | None:
        return self._names.get(tensor.name)

    def row_order(self, tensor: GgufTensor) -> RowOrder | None:
        if len(tensor.shape) != 2:
            return None
        converter, pattern = self._by_name.get(tensor.name, (None, ""))
        if converter is None:
            return RowOrder()
        operations = converter.operations
        of_inputs = [one.input_permutation for one in operations if _permutes_inputs(one)]
        others = [one for one in operations if not _permutes_inputs(one)]
        if len(converter.source_patterns) > 1 or len(of_inputs) > 1:
            return None
        numbers = torch.arange(tensor.shape[0])[:, None]
        with suppress(Exception):  # of operations that one column is too few for
            made = _operated(others, converter, {pattern: numbers})
            order = _order_in(made.numpy(), numbers.numpy())
            return order and order._replace(columns=of_inputs[0] if of_inputs else None)
        return None

    def stacked_rows(self, tensor: GgufTensor) -> range | None:
        numbers = _numbers_of(tensor)
        converter, pattern = self._by_name.get(tensor.name, (None, ""))
        if converter is None:
            return range(numbers.shape[1])
        sources = {
            source: numbers if source == pattern else torch.zeros_like(numbers)
            for source in converter.source_patterns
        }
        with suppress(Exception):  # of operations that one column is too few for
            return _rows_in(_operated(converter.operations, converter, sources), numbers)
        return None

    def add_values(self, tensor: GgufTensor, values: MutableMapping[str, Tensor]) -> None:
        target = self._names.get(tensor.name)
        if target is None:
            return
        converter, pattern = self._by_name.get(tensor.name, (None, ""))
        if converter is None:
            values[target] = tensor.values()
            return
        gathered = self._gathered.setdefault(target, {})
        gathered[pattern] = tensor.values()
        if len(gathered) == len(converter.source_patterns):
            values[target] = _operated(converter.operations, converter, self._gathered.pop(target))


def _permutes_inputs(operation: Any) -> bool:
    return getattr(operation, "input_permutation", None) is not None


def _operated(operations: Iterable[Any], converter: Any, tensors: dict[str, Tensor]) -> Tensor:
    """Result of a converter's operations on its sources, by their patterns."""
    patterns = converter.source_patterns, converter.target_patterns
    for operation in operations:
        tensors = operation.convert(
            tensors, source_patterns=patterns[0], target_patterns=patterns[1]
        )
    (made,) = tensors.values()
    return made
