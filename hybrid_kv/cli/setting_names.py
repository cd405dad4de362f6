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

PATH = Path(__file__).parent.parent / "assets" / "settings.json"
_DEFAULT = "hybrid"


def table() -> dict[str, Any]:
    """Names of all settings: those of every method ("common"), and what each has beside them."""
    from hybrid_kv.config import HybridConfig
    from hybrid_kv.plugins import METHODS

    own = [name for name in METHODS if METHODS[name].factory.__module__.startswith("hybrid_kv.")]
    names = {method: HybridConfig.settings_of(method) for method in own}
    common = set.intersection(*names.values())
    index = {path for path in names[_DEFAULT] if path.startswith("cold.index.")}
    return {
        "common": sorted(common),
        "index": sorted(index),
        "methods": {
            method: [*sorted(found - common - index), *(["*index"] if index <= found else [])]
            for method, found in names.items()
        },
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
        own = set(methods[of])
        return (
            own - {"*index"} | set(known["common"]) | set(known["index"] if "*index" in own else ())
        )

    accepted = set.union(*map(names, methods if method is None else [method]))
    for text in texts:
        key, equals, _ = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set must be KEY=VALUE like top_k=64, got '{text}'")
        # What lies below a composed method, and its own settings by dots, is known to it alone.
        if "." in key or key in accepted or any(path.endswith(f".{key}") for path in accepted):
            continue
        shown = method or _DEFAULT
        raise unknown_setting(f"{shown} setting", key, names(shown))
