"""Models that are named by an id of the Hugging Face hub, with a network or without one."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import get_session, validate_repo_id  # type: ignore[attr-defined]

from hybrid_kv.errors import ModelNotFoundError

_WAIT_S = 5.0


def hub_path(name: str) -> str:
    """The hub id where the hub answers, else the folder in which its cache has the model.

    transformers itself tries a hub that is out of reach six times for each file.

    Raises:
        ModelNotFoundError: it can be no hub id, or it is not cached and the hub does not answer.
    """
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ModelNotFoundError(
            f"model '{name}' cannot be loaded: there is no such folder, and a hub id is like "
            "OWNER/NAME; check the path"
        ) from None
    if (why := _out_of_reach()) is None:
        return name
    found = try_to_load_from_cache(name, "config.json")
    if isinstance(found, str):
        return str(Path(found).parent)
    raise ModelNotFoundError(
        f"model '{name}' cannot be loaded: there is no such folder, the hub's cache has no model "
        f"of that name, and {why}; check the path, or download the model and give its folder"
    )


def _out_of_reach() -> str | None:
    """Why the hub cannot be asked; None where it answers, whatever it says."""
    try:
        get_session().head(constants.ENDPOINT, timeout=_WAIT_S)
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE forbids to ask the hub"
    except Exception as error:  # of the client that the hub's package has chosen
        return f"the hub cannot be reached ({type(error).__name__})"
    return None
