"""Before a model is used: `hybrid_kv.plan(...)` says if it fits, how fast it is and how to run it;
`observe_heads` scores its KV heads for `duo_attention`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from hybrid_kv.api.arguments import check_source, whole_number
from hybrid_kv.api.llm import LLM
from hybrid_kv.api.turn import Turn
from hybrid_kv.config import ConfigLike, HybridConfig, composed
from hybrid_kv.errors import ConfigError, unknown_name
from hybrid_kv.keywords import known_keywords_only
from hybrid_kv.models.load import resolve_device
from hybrid_kv.ops.host_memory import free_memory
from hybrid_kv.planning.plan import Machine, ModelFacts, Plan, model_facts
from hybrid_kv.planning.planner import make_plan
from hybrid_kv.planning.rates import CARDS, Rates, measure_rates, rates_of_card
from hybrid_kv.planning.traffic import measure_prompt_rates, prompt_rates_of_card


@known_keywords_only
def plan(
    model: str | Path,
    context_tokens: int,
    *,
    config: ConfigLike = None,
    device: str | torch.device | None = None,
    card: str | None = None,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    dtype: str | torch.dtype | None = None,
    layers: int | None = None,
    weights: str | None = None,
    dequantize: bool = False,
    rates: Rates | None = None,
) -> Plan:
    """Compares dense KV in 16 and 8 bits with a tiered cache; loads no weights.

    Args:
        model: as for `load`; only its configuration is read.
        context_tokens: prompt and answer together.
        config: the tiered method, as for `load`.
        device: what the model would run on; the first GPU of this machine, else its CPU.
        card: a name of `CARDS` to plan for a GPU that is not here, with its specified bandwidths.
        device_bytes: GPU memory instead of what the device or the card has.
        host_bytes: host memory instead of what is free now.
        weights: a kind in which weights would be stored, such as int4 or q4_k_m (a name of
            `WEIGHT_KINDS`); as they are for None.
        dequantize: as for `load`: packed weights take what they do unpacked.
        rates: bandwidths instead of those measured here, which takes about a second; the time to
            the first token is predicted for a card alone then.

    Raises:
        ConfigError: an argument is unknown, of a wrong type or out of range, there is no such
            card, or the method composes several, whose tiers differ.
        ModelNotFoundError, UnsupportedModelError: the model cannot be read or tiered.
    """
    context_tokens = whole_number("context_tokens", context_tokens)
    for name, value in (("device_bytes", device_bytes), ("host_bytes", host_bytes)):
        if value is not None:
            whole_number(name, value)
    wanted = HybridConfig.of(config)
    parts = dict.fromkeys(part.method for part in composed(wanted.params))
    if len(composed(wanted.params)) > 1:
        raise ConfigError(
            "a plan must be of one method for all layers and heads, got "
            f"{wanted.method} of {', '.join(parts)}; plan for its parts one by one"
        )
    if card is not None and card not in CARDS:
        raise unknown_name("card", card, CARDS)
    check_source(model)
    target = resolve_device(device)
    facts = model_facts(
        model,
        dtype=dtype,
        layers=layers,
        weights=weights,
        dequantize=dequantize,
        device=card or str(target),
    )
    limit = facts.max_context_tokens
    if limit is not None and context_tokens > limit:
        raise ConfigError(
            f"context must be at most {limit} tokens for this model, got {context_tokens}; plan "
            "for fewer or for a model with a longer context"
        )
    host = free_memory().num_bytes if host_bytes is None else host_bytes
    machine = _machine(target, card, device_bytes, host, rates, facts)
    return make_plan(facts, machine, context_tokens, wanted)


def _machine(
    device: torch.device,
    card: str | None,
    device_bytes: int | None,
    host_bytes: int,
    rates: Rates | None,
    facts: ModelFacts,
) -> Machine:
    if card is not None:
        known = CARDS[card]
        here = rates or rates_of_card(known, measure_rates(torch.device("cpu")))
        size = device_bytes or known.memory_bytes
        prompt = prompt_rates_of_card(known, facts)
        return Machine(card, size, host_bytes, here, assumed=rates is None, prompt=prompt)
    here = rates or measure_rates(device)
    prompt = measure_prompt_rates(facts, device) if rates is None else None
    if device.type == "cuda":
        size = device_bytes or torch.cuda.get_device_properties(device).total_memory
        return Machine(torch.cuda.get_device_name(device), size, host_bytes, here, prompt=prompt)
    if device_bytes is not None:
        raise ConfigError(
            f"device_bytes is the memory of a GPU, got {device_bytes} for a model on the CPU; name "
            f"the GPU to plan for as card, one of {', '.join(CARDS)}"
        )
    return Machine("cpu", None, host_bytes, here, prompt=prompt)


# Scores of KV heads by how far back they look -----------------------------------------------------


OBSERVED_TOKENS = 256
_SINKS, _WINDOW = 64, 256


def observing() -> HybridConfig:
    """The configuration under which a model is observed."""
    return HybridConfig(
        method="duo_attention",
        page_size=16,
        sink_tokens=_SINKS,
        window_tokens=_WINDOW,
        heads="prompt",
        retrieval_ratio=1.0,
        observed_tokens=OBSERVED_TOKENS,
    )


def observe_heads(llm: LLM, text: str, num_tokens: int) -> list[list[float]]:
    """Scores in 0..1 by tiered layer and KV head, of a text that is read twice in a row.

    What lies between sinks and window is then mostly the first copy, which a head that retrieves
    looks up while the second is read; a score is the share of its attention that a head gives there
    with the last queries, which is what it would miss without. The paper trains a gate for each
    head instead.

    Args:
        llm: opened with `observing()`.
        num_tokens: of the text, its first; it is read twice.

    Raises:
        ConfigError: the model has no tokenizer, or the text is too short to look back in.
    """
    tokens = llm.require_tokenizer()(text)["input_ids"][:num_tokens]
    least = _SINKS + _WINDOW + OBSERVED_TOKENS
    if len(tokens) < least:
        raise ConfigError(
            f"a calibration text must have at least {least} tokens, got {len(tokens)}; give a "
            "longer one, or raise --tokens"
        )
    with llm.runtime.generating():
        cache = llm.runtime.cache()
        try:
            Turn(llm, cache, torch.tensor([tokens + tokens]), {"max_new_tokens": 1}).run()
            for shape in cache.kv.info.layers:
                cache.kv.layers.seal_if_open(shape.layer_idx)
            kept = [store.rows[0].kept for store in cache.kv.stores.values()]
        finally:
            cache.close()
    return [entries.state["scores"].tolist() for entries in kept if entries is not None]
