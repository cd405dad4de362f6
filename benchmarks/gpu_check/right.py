"""Is it right: logits of a device against the host's in float64, rows and forks against each alone.

A model of a few layers is computed in float32; what it is told after the prompt is drawn, so that
two runs are asked the same whatever they answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import hybrid_kv as hkv
from benchmarks.gpu_check.end_to_end import prompt
from benchmarks.gpu_check.limits import Difference, largest
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.sizes import Sizes
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.hf_cache import TieredCache
from hybrid_kv.models.load import load_model
from hybrid_kv.runtime import KVCache

_STEPS = 5
"""New tokens: a step is captured when it comes a second time, and replayed from then on."""
_GAIN = 1.5
"""Deviation of what a linear layer of the model makes of numbers with a deviation of one."""
_LIMIT = 1e-2
"""Of the logits' standard deviation: float32 with products in 10 bits stays far below it, and
another row's entries give several deviations."""

_SMALL: dict[str, Any] = {"sink_tokens": 16, "window_tokens": 64, "index_build": "wait"}
_OPENED = {**_SMALL, "cold": {"top_k": "all"}}
ON_DEVICE: dict[str, Any] = {**_SMALL, "select": "device"}

Runs = dict[str, list[Tensor]]


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device = torch.device(settings["device"])
    model, ids = model_and_ids(sizes)
    exact = _in_float64(model, ids)
    model = model.to(device)
    for name, config in {
        "every entry": hkv.HybridConfig(**_OPENED),
        "every entry, states on the host": hkv.HybridConfig(**_OPENED, prefill_states="host"),
        "full": hkv.HybridConfig(method="full"),
    }.items():
        work = partial(against_float64, model, ids, config, exact)
        record.measure(f"logits against float64, {name}", work)
    for select in ("device", "host"):
        config = hkv.HybridConfig(**_SMALL, select=select)
        for name, case in CASES.items():
            record.measure(name, partial(case, model, ids, config), select=select)
    record.measure("one owner and equal entries", partial(integrity, model, ids))


def model_and_ids(sizes: Sizes) -> tuple[Any, Tensor]:
    """The model, on the host, and [1, N] of a prompt and the new tokens behind it."""
    options = {"dtype": torch.float32, "layers": sizes.checked_layers, "seed": 0}
    model = load_model(sizes.model, device="cpu", **options)
    _spread(model)
    return model, prompt(sizes, sizes.checked_tokens + _STEPS)


def against_float64(
    model: Any, ids: Tensor, config: hkv.HybridConfig, exact: Tensor
) -> dict[str, Any]:
    """Logits behind a prompt and behind each new token, everything being attended."""
    with torch.inference_mode(), hkv.attach(model, config) as runtime:
        cache = runtime.cache()
        found = [_asked(model, cache, ids[:, :-_STEPS]), *_new(model, [cache], [ids])[0]]
    return _compared({"logits": found}, {"logits": list(exact)})


def rows_of_two_prompts(model: Any, ids: Tensor, config: hkv.HybridConfig) -> dict[str, Any]:
    """Two sequences in a batch, and each by itself."""
    both = torch.cat([ids, ids.flip(1)])
    with torch.inference_mode(), hkv.attach(model, config) as runtime:
        found: list[Runs] = []
        for some in ([both], [both[:1], both[1:]]):
            parts = list[list[Tensor]]()
            for one in some:
                cache = runtime.cache()
                first = _asked(model, cache, one[:, :-_STEPS])
                parts.append([first, *_new(model, [cache], [one])[0]])
                cache.close()
            found.append({"logits": [torch.cat(step) for step in zip(*parts, strict=True)]})
    return _compared(*found)


def rows_of_one_prompt(model: Any, ids: Tensor, config: hkv.HybridConfig) -> dict[str, Any]:
    """Two rows that share what has left the window, as beams do, and forks that do so alone."""
    both = torch.cat([ids, ids.flip(1)])
    with torch.inference_mode(), hkv.attach(model, config) as runtime:
        cache = runtime.cache()
        _asked(model, cache, ids[:, :-_STEPS])
        alone = [_new(model, [cache.fork()], [one[None]])[0] for one in both]
        cache.batch_repeat_interleave(2)
        found = _new(model, [cache], [both])[0]
    return _compared(
        {"logits": found}, {"logits": [torch.cat(step) for step in zip(*alone, strict=True)]}
    )


def forks_in_turns(model: Any, ids: Tensor, config: hkv.HybridConfig) -> dict[str, Any]:
    """Two forks that decode by turns, and two that decode one after the other."""
    each = [ids, ids.flip(1)]
    with torch.inference_mode(), hkv.attach(model, config) as runtime:
        cache = runtime.cache()
        _asked(model, cache, ids[:, :-_STEPS])
        alone = [_new(model, [cache.fork()], [one])[0] for one in each]
        by_turns = _new(model, [cache.fork(), cache.fork()], each)
    names = ("first", "second")
    return _compared(dict(zip(names, by_turns, strict=True)), dict(zip(names, alone, strict=True)))


Case = Callable[[Any, Tensor, hkv.HybridConfig], dict[str, Any]]
CASES: dict[str, Case] = {
    "two rows of one prompt against each alone": rows_of_one_prompt,
    "two rows of two prompts against each alone": rows_of_two_prompts,
    "two forks by turns against each alone": forks_in_turns,
}


def integrity(model: Any, ids: Tensor) -> dict[str, Any]:
    """One owner for each token, after a prompt, steps, a crop and a fork; entries that have left
    the device are those of a dense run, bit by bit.
    """
    checked, unequal, compared = list[str](), 0, 0

    def after(config: hkv.HybridConfig, new: int, look: Callable[[KVCache], None]) -> None:
        with torch.inference_mode(), hkv.attach(model, config) as runtime:
            cache = runtime.cache()
            _asked(model, cache, ids[:, :-_STEPS])
            _new(model, [cache], [ids], new)
            look(cache.kv)

    dense: dict[int, list[Tensor]] = {}

    def keep(kv: KVCache) -> None:
        for layer_idx, layer in kv.stores.items():
            view = layer.resident.view()
            dense[layer_idx] = [view.k[0].cpu(), view.v[0].cpu()]

    def compare(kv: KVCache) -> None:
        nonlocal unequal, compared
        for layer_idx, layer in kv.stores.items():
            extent = layer.rows[0].chain.spans[0].extent
            rows = torch.randint(extent.length, (64,))
            places = extent.positions[rows].long()
            for cold, all_of_it in zip((extent.k, extent.v), dense[layer_idx], strict=True):
                unequal += int((cold[:, rows] != all_of_it[:, places]).sum())
                compared += 64
        for name, change in {
            "prompt and steps": lambda: None,
            "crop": lambda: [kv.layers[idx].crop(2) for idx in kv.layers],
            "fork": lambda: [kv.layers[idx].fork([0, 0]) for idx in kv.layers],
        }.items():
            change()
            kv.check_integrity()
            checked.append(name)

    after(hkv.HybridConfig(method="full"), 0, keep)
    after(hkv.HybridConfig(**ON_DEVICE), _STEPS, compare)
    return {
        "checked": checked,
        "compared_rows": compared,
        "different_values": Difference(unequal, 0),
    }


def _spread(model: Any) -> None:
    """Weights by which attention tells tokens apart and counts in the logits, at any width."""
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight.data
            weight.mul_(_GAIN / (weight.std() * weight.shape[1] ** 0.5))


def _in_float64(model: Any, ids: Tensor) -> Tensor:
    """[steps + 1, 1, vocabulary]: transformers' own logits behind the prompt and each new token."""
    model = model.double()
    with torch.inference_mode():
        logits: Tensor = model(ids, logits_to_keep=_STEPS + 1).logits
    model.float()
    return logits.transpose(0, 1)


def _asked(model: Any, cache: TieredCache, ids: Tensor) -> Tensor:
    """[B, vocabulary], on the host: the logits behind the last of ids [B, T]."""
    out = model(ids.to(model.device), **passing(cache), use_cache=True, logits_to_keep=1)
    logits: Tensor = out.logits[:, -1].cpu()
    return logits


def _new(
    model: Any, caches: Sequence[TieredCache], ids: Sequence[Tensor], count: int = _STEPS
) -> list[list[Tensor]]:
    """Logits behind each of the last tokens of some ids, each on its own cache, by turns."""
    found: list[list[Tensor]] = [[] for _ in caches]
    for number in range(count):
        at = ids[0].shape[1] - _STEPS + number
        for parts, cache, some in zip(found, caches, ids, strict=True):
            parts.append(_asked(model, cache, some[:, at : at + 1]))
    return found


def _compared(found: Runs, expected: Runs) -> dict[str, Any]:
    """The largest difference of logits by name, held to a share of their deviation."""
    values: dict[str, Any] = {}
    for name, logits in expected.items():
        both = [torch.stack(some).double() for some in (found[name], logits)]
        deviation = float(both[1].std())
        worst = largest(both[0], both[1])
        values[f"{name}_largest_difference"] = Difference(worst, _LIMIT * deviation)
        values[f"{name}_deviation"] = deviation
    return values
