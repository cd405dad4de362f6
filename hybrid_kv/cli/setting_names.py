"""Unknown names of --set, refused before PyTorch is imported, which takes seconds.

The names are a table that `table()` makes of the built-in methods; tests hold it to them. What a
value may be is said by the method itself, later.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybrid_kv.errors import ConfigError, unknown_setting
from hybrid_kv.former import is_former

PATH = Path(__file__).parent.parent / "assets" / "settings.json"
_DEFAULT = "hybrid"


def table() -> dict[str, Any]:
    """Names of all settings: those of every method ("common"), and what each has beside them."""
    from hybrid_kv.config import HybridConfig, settings_in
    from hybrid_kv.plugins import INDEXES, METHODS

    own = [name for name in METHODS if METHODS[name].factory.__module__.startswith("hybrid_kv.")]
    names = {method: HybridConfig.settings_of(method) for method in own}
    common = set.intersection(*names.values())
    kinds = {kind: settings_in(INDEXES[kind].params) for kind in INDEXES}
    return {
        "common": sorted(common),
        "index": sorted({name for names in kinds.values() for name in names}),
        "methods": {method: sorted(found - common) for method, found in names.items()},
    }


def check_names(method: str | None, texts: Iterable[str]) -> None:
    """Raises ConfigError for a setting KEY=VALUE that is none of the method's, or of any for None.

    A method that is not built in is asked itself, later.
    """
    known = json.loads(PATH.read_text(encoding="utf-8"))
    methods = known["methods"]
    if method is not None and method not in methods:
        return

    def names(of: str) -> set[str]:
        return {*methods[of], *known["common"]}

    accepted = set.union(*map(names, methods if method is None else [method]))
    if any(name.startswith("cold.index.") for name in accepted):
        accepted.update(known["index"])  # of another kind, which may be given beside it
    for text in texts:
        key, equals, _ = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set must be KEY=VALUE like top_k=64, got '{text}'")
        group, _, last = key.rpartition(".")
        if group == "cold" and method is not None and is_former(method, last):
            raise unknown_setting(f"{method} setting", key, ())
        # What lies below a composed method, and its own settings by dots, is known to it alone.
        if "." in key or key in accepted or any(path.endswith(f".{key}") for path in accepted):
            continue
        shown = method or _DEFAULT
        raise unknown_setting(f"{shown} setting", key, names(shown))
