"""Reads checkpoints of GPTQ, AWQ and compressed-tensors without their libraries, into blocks of the
engine's on a CPU, or unpacked.

What a checkpoint's configuration says is looked at first, then names and shapes of its tensors, and
its numbers when they are read. transformers reads them; a `HfQuantizer` brings each matrix into
blocks as soon as its tensors are there, those of a layer's experts into one stack. What the
checkpoint left plain stays plain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hybrid_kv.errors import ModelNotFoundError
from hybrid_kv.models.block_quantiser import IntoBlocks, empty_experts, empty_linear
from hybrid_kv.models.expert_names import Merge, StoredNames, merges_of
from hybrid_kv.models.packed_experts import (
    DOWN,
    GATE,
    UP,
    PackedExperts,
    can_be_packed,
    order_name,
)
from hybrid_kv.models.packed_linear import PackedLinear
from hybrid_kv.models.stored_codes import StoredCodes, UnfitError, read_codes, stored_layout
from hybrid_kv.ops.native.linear import PACKED_KINDS

_BLOCK = 32
_Shapes = Mapping[str, tuple[int, ...]]


# Reading ----------------------------------------------------------------------------------------

_METHOD = "hybrid_kv_stored"


@register_quantization_config(_METHOD)
class StoredConfig(QuantizationConfigMixin):
    """Settings of `StoredQuantizer`, as `from_pretrained` takes them.

    Args:
        name: what the user called the model; for messages.
        told: the checkpoint's own quantization_config.
        dequantize: make plain layers of it.
        exact: as of `PackedLinear`.
    """

    def __init__(
        self, name: str, told: Mapping[str, Any], *, dequantize: bool, exact: bool, **_: Any
    ) -> None:
        self.quant_method = _METHOD  # type: ignore[assignment]  # or any registered name
        self.name, self.told, self.exact = name, told, exact
        self.dequantize = dequantize
        self.layout = stored_layout(told)

    def to_dict(self) -> dict[str, Any]:
        """The checkpoint's own."""
        return dict(self.told)


@register_quantizer(_METHOD)
class StoredQuantizer(IntoBlocks):
    """Makes of a checkpoint's packed matrices blocks of the engine's, or plain ones.

    orders: of inputs, by module and buffer, where blocks are not in their order; transformers
    empties buffers that it did not read, so that modules get them last. unfit: what has no blocks.
    parts: by weight of experts, the checkpoint's names of its matrices: for each part of an
    expert's rows those of all experts.
    """

    quantization_config: StoredConfig
    orders: dict[tuple[nn.Module, str], Tensor]
    unfit: list[str]
    parts: dict[str, list[list[str]]]

    def __init__(self, quantization_config: StoredConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.orders, self.unfit, self.parts = {}, [], {}

    def update_weight_conversions(self, weight_conversions: list[Any], *model: Any) -> list[Any]:
        """Put conversions of packed experts before the model's own, which take plain ones.

        transformers before 5.24 gives no model.
        """
        made = [_converters(merge, self) for merge in merges_of(weight_conversions)]
        update: Any = super().update_weight_conversions
        return [*chain(*made), *update(weight_conversions, *model)]

    def get_weight_conversions(self) -> list[WeightConverter]:
        """From a matrix's tensors to its weight."""
        names = [rf"\.{name}$" for name in _tensor_names(self.quantization_config)]
        return [WeightConverter(names, ".weight", [_Convert(self)])]

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        config = self.quantization_config
        stored = _matrices(config, kwargs.get("checkpoint_files") or ())
        names, experts = StoredNames(model), defaultdict[str, list[str]](list)
        for name, shapes in stored.items():
            target, is_expert = names.find(name)
            path = target.rpartition(".")[0]
            if names.is_ignored(target):
                continue
            if is_expert is None:
                raise _refused(config, f"the model has matrix {name} in another form")
            if is_expert:
                experts[path].append(name)
            else:
                self._take_linear(model, path, shapes)
        for path, found in experts.items():
            self._take_experts(model, path, {name: stored[name] for name in found}, names)

    def _take_linear(self, model: PreTrainedModel, path: str, shapes: _Shapes) -> None:
        config = self.quantization_config
        module = _module(model, path, "linear layer", config)
        if _is_router(model, path):  # small, and multiplied by the model's own code
            _check_shapes(path, module.get_parameter("weight").shape, shapes, config)
            return
        if type(module) is not nn.Linear:
            kind = type(module).__name__
            raise _refused(config, f"the model's {path} is a {kind}, no linear layer")
        _check_shapes(path, module.weight.shape, shapes, config)
        if "bias" in shapes and module.bias is None:  # zeros, as AutoGPTQ writes them
            module.bias = nn.Parameter(torch.empty(module.out_features, device="meta"))
        if not config.dequantize:
            kind = config.layout.kind  # till its numbers say of which it is
            model.set_submodule(path, empty_linear(module, kind, exact=config.exact))

    def _take_experts(
        self, model: PreTrainedModel, path: str, stored: Mapping[str, _Shapes], names: StoredNames
    ) -> None:
        config = self.quantization_config
        module = _module(model, path, "experts", config)
        prefix = next(iter(stored)).rsplit(".", 2)[0]
        made: dict[str, list[list[str]]] = {}
        for leaf, own in names.parts(path, prefix).items():
            weight = module._parameters.get(leaf)
            if weight is None or weight.dim() != 3:
                raise _refused(config, f"the model's {path} has no weight {leaf} of all experts")
            experts, rows, columns = weight.shape
            made[leaf] = [[f"{prefix}.{e}.{part}" for e in range(experts)] for part in own]
            shape = torch.Size((rows // len(own), columns))
            for matrices in made[leaf]:
                _check_part(matrices, shape, stored, config)
        known = {name for parts in made.values() for part in parts for name in part}
        if extra := [name for name in stored if name not in known]:
            raise _refused(config, f"the model has no expert {extra[0].rpartition('.')[0]}")
        if config.dequantize:
            self.parts.update({f"{path}.{leaf}": parts for leaf, parts in made.items()})
            return
        fits = can_be_packed(module) and not module.__dict__.get("is_transposed", False)
        if not fits:
            kind = type(module).__name__
            raise _refused(
                config, f"the model's {path} is a {kind}, which only dequantize=True can read"
            )
        kind = config.layout.kind
        empty = empty_experts(module, kind, exact=config.exact, is_split=True)
        model.set_submodule(path, empty)
        for leaf, parts in made.items():
            for stack, matrices in zip(_stacks(leaf, len(parts)), parts, strict=True):
                self.parts[f"{path}.{stack}"] = [matrices]

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **kwargs: Any
    ) -> PreTrainedModel:
        if self.unfit:
            raise _refused(self.quantization_config, self.unfit[0])
        for (module, buffer), order in self.orders.items():
            setattr(module, buffer, order)
        self.orders.clear()
        if self.quantization_config.dequantize:  # before 5.24 saving would try to pack it again
            vars(model).pop("_weight_conversions", None)
        return model


class _Convert(ConversionOps):
    """The weight of one matrix from its tensors."""

    def __init__(self, hf_quantizer: StoredQuantizer) -> None:
        self.hf_quantizer = hf_quantizer  # by which transformers knows not to cast what is read

    def __deepcopy__(self, memo: Any) -> _Convert:
        return self

    def convert(self, input_dict: dict[str, Any], *_: Any, **kwargs: Any) -> dict[str, Any]:
        """By name the blocks, or the values, of a matrix [N, K].

        An error here would come out as a table of transformers', so it is kept for later.
        """
        target, model = kwargs["full_layer_name"], kwargs["model"]
        config, path = self.hf_quantizer.quantization_config, target.rpartition(".")[0]
        module, tensors = model.get_submodule(path), {}
        for pattern, value in input_dict.items():
            tensor: Tensor = value[0] if isinstance(value, list) else value
            tensors[pattern.strip("\\.$")] = tensor.cpu()
        weight = None if isinstance(module, PackedLinear) else module.weight
        shape = module.shape_of("weight") if weight is None else weight.shape
        codes = read_codes(config.layout, tensors, *shape)
        try:
            if weight is not None:
                values = torch.empty(shape, dtype=weight.dtype)
                return {target: codes.values(values).to(tensor.device)}
            kind, blocks, order = codes.blocks()
        except UnfitError as error:
            self.hf_quantizer.unfit.append(f"matrix {path} {error}")
            return {}
        module.kind = kind
        if order is not None:
            self.hf_quantizer.orders[module, "columns_in"] = order
        return {target: nn.Parameter(blocks, requires_grad=False)}


class _ConvertExperts(ConversionOps):
    """A weight of all experts of a layer from their tensors, which come in the order of experts.

    Args:
        places: by pattern of a tensor's name the part of the weight that it is for, and what it is.
    """

    def __init__(
        self, hf_quantizer: StoredQuantizer, places: Mapping[str, tuple[int, str]]
    ) -> None:
        self.hf_quantizer = hf_quantizer  # by which transformers knows not to cast what is read
        self._places = places

    def __deepcopy__(self, memo: Any) -> _ConvertExperts:
        return self

    def convert(self, input_dict: dict[str, Any], *_: Any, **kwargs: Any) -> dict[str, Any]:
        """By name the blocks, or the values, of all experts; errors as in `_Convert`."""
        target: str = kwargs["full_layer_name"]
        path, leaf = target.rpartition(".")[::2]
        module: nn.Module = kwargs["model"].get_submodule(path)
        found = {self._places[pattern]: tensors for pattern, tensors in input_dict.items()}
        device = next(iter(found.values()))[0].device
        try:
            if isinstance(module, PackedExperts):
                codes = self._codes(target, found, module.shape_of(leaf))
                return {target: self._blocks(module, leaf, codes)}
            weight = module.get_parameter(leaf)
            values = torch.empty(weight.shape, dtype=weight.dtype)
            codes, parts = self._codes(target, found, weight.shape), self.hf_quantizer.parts[target]
            for rows, part in zip(values.chunk(len(parts), 1), parts, strict=True):
                for out, name in zip(rows, part, strict=True):
                    with _named(name):
                        codes[name].values(out)
            return {target: values.to(device)}
        except UnfitError as error:
            self.hf_quantizer.unfit.append(str(error))
            return {}

    def _codes(
        self, target: str, found: Mapping[tuple[int, str], list[Tensor]], shape: torch.Size
    ) -> dict[str, StoredCodes]:
        """By the checkpoint's name the matrices of a weight [E, N, K], part by part."""
        quantizer, codes = self.hf_quantizer, {}
        layout, parts = quantizer.quantization_config.layout, quantizer.parts[target]
        for place, part in enumerate(parts):
            lists = {leaf: tensors for (where, leaf), tensors in found.items() if where == place}
            for expert, name in enumerate(part):
                tensors = {leaf: some[expert].cpu() for leaf, some in lists.items()}
                if bool(tensors.get("bias", torch.zeros(1)).any()):
                    raise UnfitError(f"matrix {name} has a bias, for which there is no place")
                codes[name] = read_codes(layout, tensors, shape[1] // len(parts), shape[2])
        return codes

    def _blocks(
        self, module: PackedExperts, leaf: str, codes: Mapping[str, StoredCodes]
    ) -> nn.Parameter:
        """Blocks of all experts, each made where it stays; zeros that are not centred in one
        matrix are those of all.
        """
        kinds, orders = set(), []
        for name, one in codes.items():
            with _named(name):
                kinds.add(one.kind())
        kind = kinds.pop() if len(kinds) == 1 else "Q4_1"
        experts, rows, columns = module.shape_of(leaf)
        blocks = torch.empty(
            experts, rows, PACKED_KINDS[kind].row_bytes(columns), dtype=torch.uint8
        )
        for out, (name, one) in zip(blocks, codes.items(), strict=True):
            with _named(name):
                orders.append(one.blocks(kind, out)[2])
        module.set_kind(leaf, kind)
        if any(order is not None for order in orders):
            same = torch.arange(columns)
            order = torch.stack([same if order is None else order for order in orders])
            self.hf_quantizer.orders[module, order_name(leaf)] = order
        return nn.Parameter(blocks.flatten(0, 1), requires_grad=False)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Says which matrix has no blocks."""
    try:
        yield
    except UnfitError as error:
        raise UnfitError(f"matrix {name} {error}") from None


# Names and shapes --------------------------------------------------------------------------------


def _tensor_names(config: StoredConfig) -> list[str]:
    """Names of a matrix's tensors, behind its own."""
    form = config.layout.form
    return [*form.names, *(("weight_shape",) if form.numbers == "weight_packed" else ())]


def _stacks(leaf: str, num_parts: int) -> tuple[str, ...]:
    """Names of a weight's stacks in `PackedExperts`: gate and up have orders of their own."""
    return (leaf,) if num_parts == 1 else (GATE, UP)


def _converters(merge: Merge, quantizer: StoredQuantizer) -> Iterator[WeightConverter]:
    """Conversions of a merge's packed matrices: into its weight where they are unpacked, else into
    the stack of each part.
    """
    config = quantizer.quantization_config
    head, _, leaf = merge.target.rpartition(".")
    groups = {merge.target: merge.parts}
    if not config.dequantize:
        stacks = zip(_stacks(leaf, len(merge.parts)), merge.parts, strict=True)
        groups = {f"{head}.{stack}": (part,) for stack, part in stacks}
    for target, parts in groups.items():
        places = {
            rf"{merge.prefix}\.\d+\.{part}\.{name}$": (place, name)
            for place, part in enumerate(parts)
            for name in (*_tensor_names(config), "bias")
        }
        yield WeightConverter([*places], target, [_ConvertExperts(quantizer, places)])


def _matrices(config: StoredConfig, files: Iterable[Any]) -> Mapping[str, _Shapes]:
    """By name of a packed matrix the shapes of its tensors, and of its bias, by theirs."""
    form = config.layout.form
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise _refused(config, f"file {file} is no safetensors file")
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118  # no mapping
                path, _, name = key.rpartition(".")
                if name in (*form.names, "bias", "weight"):
                    shape = tuple(opened.get_slice(key).get_shape())
                    shapes.setdefault(path, {})[name] = shape
    found = {path: own for path, own in shapes.items() if own.keys() & {form.numbers, form.scales}}
    if not found:
        raise _refused(config, f"no tensor is a {form.numbers}")
    return found


def _module(model: PreTrainedModel, path: str, what: str, config: StoredConfig) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise _refused(config, f"the model has no {what} {path}") from None


def _is_router(model: PreTrainedModel, path: str) -> bool:
    """Whether this is no linear layer, and a matrix beside experts."""
    module, beside = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    weight = module._parameters.get("weight")
    return (
        type(module) is not nn.Linear
        and weight is not None
        and weight.dim() == 2
        and any(DOWN in child._parameters for child in beside.children())
    )


def _check_part(
    names: Sequence[str], shape: torch.Size, stored: Mapping[str, _Shapes], config: StoredConfig
) -> None:
    """Looks at a matrix of every expert: each must have what one of them has."""
    leaves = {leaf for name in names for leaf in stored.get(name, {})} - {"weight"}
    for name in names:
        shapes = stored.get(name, {})
        _check_shapes(name, shape, shapes, config)
        if missing := leaves - shapes.keys():
            raise _refused(config, f"tensor {name}.{min(missing)} is missing")


def _check_shapes(path: str, shape: torch.Size, shapes: _Shapes, config: StoredConfig) -> None:
    """Looks at the tensors of a matrix [N, K]."""
    form, (rows, columns) = config.layout.form, shape
    wanted = config.layout.shapes(rows, columns)
    if columns % _BLOCK or rows % 8:
        raise _refused(
            config,
            f"matrix {path} has {columns} inputs and {rows} outputs, which must be multiples of "
            f"{_BLOCK} and 8",
        )
    if "weight" in shapes:
        raise _refused(config, f"matrix {path} is stored both packed and plain")
    for name, size in wanted.items():
        if name not in shapes:
            if name == form.groups or (name == form.zeros and not form.needs_zeros):
                continue
            raise _refused(config, f"tensor {path}.{name} is missing")
        if shapes[name] != size:
            raise _refused(
                config, f"tensor {path}.{name} is {list(shapes[name])} instead of {list(size)}"
            )


def _refused(config: StoredConfig, why: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"model '{config.name}', packed by {config.layout.method}, cannot be read: {why}; check "
        "that the download is complete, or take the model in 16 bits or as a GGUF file"
    )


def stored_settings(
    name: str, config: PreTrainedConfig, *, dequantize: bool, exact: bool
) -> dict[str, Any]:
    """The quantization_config by which transformers reads a checkpoint of one of `FORMS` here.

    Arguments are those of `StoredConfig`.

    Raises:
        UnfitError: its layout has no blocks.
    """
    told = told_by(config)
    stored_layout(told)
    options = {"dequantize": dequantize, "exact": exact}
    return {"quant_method": _METHOD, "name": name, "told": told, **options}


def told_by(config: PreTrainedConfig) -> Mapping[str, Any]:
    """The quantization_config of a checkpoint's configuration."""
    told: Any = config.quantization_config
    return told if isinstance(told, Mapping) else told.to_dict()
