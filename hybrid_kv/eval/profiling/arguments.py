"""Arguments of a profile: all that it takes to run it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError

from hybrid_kv.config import HybridConfig, Params, first_sentence
from hybrid_kv.errors import ConfigError, said, unknown_name
from hybrid_kv.plugins import METHODS

SHORT_NAMES = {"graph": "retrieval_attention"}
"""Methods by the name of their index, as the paper's tables call them."""

METHODS_BY_DEFAULT = ("full", "flat", "ivf", "hnsw", "quest", "retrieval_attention", "hybrid")
CONTEXTS_BY_DEFAULT = tuple(2**power for power in range(12, 18))
TRACED_STEPS = 3
SYNTHETIC_LIMIT_S = 120.0
"""Seconds that a row of a made-up context takes at most, if nothing else is said."""


class ProfileArguments(Params):
    """One sweep over contexts and methods.

    model, layers, device, dtype, weights, dequantize, exact_products: as `load_model`. contexts:
    prompt tokens, ascending. methods: registered names, in the order of the rows. fill: "prefill"
    computes a prompt of random tokens, "synthetic" puts attention-like KV in place. new_tokens:
    decode steps that are measured, after warmup_tokens that are not. audit_every: steps from one
    look of the audit to the next, in a pass of as many further steps; 0 for no audit. trace: keeps
    the spans of three further steps. row_limit_s: seconds that a row may take before it is skipped
    or measured shorter; None for no limit. settings: by dotted name, for the methods that know
    them. Quest's dense layers are none where `layers` would leave no others, unless they are set.
    """

    model: str
    contexts: tuple[int, ...] = CONTEXTS_BY_DEFAULT
    methods: tuple[str, ...] = METHODS_BY_DEFAULT
    fill: Literal["prefill", "synthetic"] = "prefill"
    layers: int | None = None
    new_tokens: int = Field(default=32, ge=1)
    warmup_tokens: int = Field(default=4, ge=0)
    audit_every: int = Field(default=2, ge=0)
    row_limit_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    settings: dict[str, Any] = Field(default_factory=dict)
    device: str | None = None
    dtype: str | None = None
    weights: str | None = None
    dequantize: bool = False
    exact_products: bool = False
    seed: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any], source: str = "the profile") -> ProfileArguments:
        """Checked arguments; `source` is what errors call them.

        Args:
            values: by name; `config` (a HybridConfig, a dict of its settings or the name of a
                method) may stand for `methods` and `settings`.

        Raises:
            ConfigError: a name is unknown, a value is out of range, or a method or a setting is
                unknown.
        """
        try:
            asked = cls.model_validate(_without_config(values))
        except ValidationError as error:
            raise ConfigError(f"arguments of {source}: {first_sentence(error)}") from None
        if not asked.contexts or min(asked.contexts) < 1:
            raise ConfigError(
                f"contexts must be numbers of at least 1, got {list(asked.contexts)}; name one"
            )
        found = asked.model_copy(
            update={
                "contexts": tuple(sorted(set(asked.contexts))),
                "methods": method_names(asked.methods),
            }
        )
        found.configs()
        return found

    @property
    def steps(self) -> int:
        """Decode steps of one row at most, all passes together."""
        measured = self.warmup_tokens + self.new_tokens
        audited = self.new_tokens if self.audit_every else 0
        # Each pass begins with a step of its own, and on a device may end with one too many.
        return measured + audited + TRACED_STEPS + 3 * 2

    def configs(self) -> dict[str, HybridConfig]:
        """The configuration of each method; indexes are waited for unless a setting says otherwise.

        Raises:
            ConfigError: a setting is known to none of the methods, or its value is wrong.
        """
        if "audit_every" in self.settings:
            raise ConfigError("audit_every is given by --audit-every, got it as a setting")
        for key in self.settings:
            if not any(HybridConfig.knows(method, key) for method in self.methods):
                raise ConfigError(
                    f"setting '{key}' is known to none of the methods {', '.join(self.methods)}; "
                    "leave it out or see `hybrid-kv methods NAME`"
                )
        return {method: self._config(method) for method in self.methods}

    def _config(self, method: str) -> HybridConfig:
        known = {k: v for k, v in self.settings.items() if HybridConfig.knows(method, k)}
        config = HybridConfig.from_settings({**known, "method": method}, {"index_build": "wait"})
        dense = getattr(config, "dense_layers", 0)
        if self.fill == "synthetic" and config.prefill_error is not None:
            raise ConfigError(
                f"prefill={said(config.prefill)} has no effect with fill 'synthetic', which "
                "computes no prompt; leave it out or take fill 'prefill'"
            )
        if self.layers is not None and "dense_layers" not in self.settings and dense >= self.layers:
            return config.replace(dense_layers=0)
        return config

    def changed(self, config: HybridConfig) -> str | None:
        """Sentence on what is not the method's default because layers are missing; None mostly."""
        if getattr(config, "dense_layers", None) != 0 or "dense_layers" in self.settings:
            return None
        return (
            f"measured with dense_layers=0: by default {config.method} reads its first layers "
            f"whole, and the {self.layers} that are left would all be among them"
        )


def _without_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with one method and its settings in place of a configuration."""
    kept = dict(values)
    if "config" not in kept:
        return kept
    for name in ("methods", "settings"):
        if name in kept:
            raise ConfigError(f"config and {name} are both given; keep one")
    config = HybridConfig.of(kept.pop("config"))
    flat = config.flat()
    given = (config.model_fields_set | config.params.model_fields_set) - {"method", "params"}
    return {
        **kept,
        "methods": (config.method,),
        "settings": {name: flat[name] for name in flat if name in given},
    }


def method_names(names: Sequence[str]) -> tuple[str, ...]:
    """Registered names, each once, short ones written out.

    Raises:
        ConfigError: a name is unknown; the message has the nearest one.
    """
    for name in names:
        if name not in METHODS and name not in SHORT_NAMES:
            raise unknown_name("method", name, [*METHODS, *SHORT_NAMES])
    if not names:
        raise ConfigError("methods must name at least one, got none; leave it out for all")
    return tuple(dict.fromkeys(SHORT_NAMES.get(name, name) for name in names))
