"""Reading a checkpoint through transformers: all of it, on its device, or one sentence why not."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from logging import ERROR, NOTSET, WARNING, Filter, LogRecord, getLogger
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from hybrid_kv.errors import BackendUnavailable, HybridKVError, ModelNotFoundError
from hybrid_kv.runtime import memory_errors

_REASON_CHARACTERS = 400
_NAMED = 3  # tensors that a sentence names of each kind
_REPORTER = getLogger("transformers.modeling_utils")
_CONVERSION_ERROR = re.compile(r"^(.+)\nError: \w+ on tensors destined for ", re.MULTILINE)
"""The last line of what an error says; its traceback stands before it."""


def read_config(name: str, path: str, **where: Any) -> PreTrainedConfig:
    """The configuration of a checkpoint.

    Args:
        name: what the user called the model; for messages.
        path: a folder or a hub id.
        where: handed to `from_pretrained`, as `gguf_file`.

    Raises:
        ModelNotFoundError: it cannot be read; the message says why.
    """
    with one_sentence(name, "be loaded"):
        return AutoConfig.from_pretrained(path, **where)  # type: ignore[no-any-return]


def read_tokenizer(name: str, path: str, **where: Any) -> PreTrainedTokenizerBase:
    """The tokenizer beside a checkpoint's weights; arguments and errors as `read_config`."""
    with one_sentence(name, "give its tokenizer"):
        return AutoTokenizer.from_pretrained(path, **where)


def read_model(
    name: str,
    path: str,
    device: torch.device,
    dtype: torch.dtype | None,
    quantization_config: Any = None,
    **where: Any,
) -> PreTrainedModel:
    """A checkpoint's model, every tensor read from a file straight to `device`.

    Args:
        dtype: of the weights; None keeps the stored one.
        where: as in `read_config`.

    Raises:
        ModelNotFoundError: a file is missing or damaged, or tensors are missing, left over or of
            another shape; the message names them.
        BackendUnavailable: weights cannot be packed, or unpacked, here.
        DeviceMemoryError, CapacityError: the weights do not fit into the memory of GPU or host.
    """
    if quantization_config is not None:  # None would overrule what the checkpoint's config says
        where["quantization_config"] = quantization_config
    with one_sentence(name, "be loaded"), memory_errors(lambda: "load"), _no_report(name):
        read: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype or "auto",
            # Without a map all weights are in host memory at once, and are then copied from there.
            device_map={"": device},
            # Shapes that differ are told below, with the other tensors that do not fit.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **where,
        )
    model, info = read
    info["mismatched_keys"] |= getattr(getattr(model, "hf_quantizer", None), "misfits", set())
    check_tensors(name, info)
    return model.eval()  # type: ignore[no-any-return]


@contextmanager
def one_sentence(name: str, what: str) -> Iterator[None]:
    """Turns whatever transformers raises over a model into one sentence; ours pass as they are."""
    try:
        yield
    except HybridKVError:
        raise
    except Exception as error:
        raise ModelNotFoundError(
            f"model '{name}' cannot {what}: {reason(error)}; check the folder or the hub id"
        ) from error


def reason(error: Exception) -> str:
    """Text of an error on one line; the name of its type where it says next to nothing.

    Messages of transformers often begin with a line that says little and go on with the cause.
    """
    text = " ".join(str(error).split()).rstrip(".;: ")
    if not text or isinstance(error, KeyError):
        text = f"{type(error).__name__} {text}".strip()
    if len(text) <= _REASON_CHARACTERS:
        return text
    return text[:_REASON_CHARACTERS].rsplit(" ", 1)[0] + " ..."


@contextmanager
def _no_report(name: str) -> Iterator[None]:
    """Without transformers' table of tensors that do not fit: our sentence names them.

    An error while a tensor was packed or unpacked stands nowhere else, and is raised.
    """
    before, report = logging.get_verbosity(), _Report()
    logging.set_verbosity(max(before, ERROR))
    _REPORTER.setLevel(WARNING)
    _REPORTER.addFilter(report)
    try:
        yield
    except RuntimeError as error:
        if (why := report.conversion_error) is None:
            raise
        if "out of memory" in why:
            raise torch.OutOfMemoryError(why) from error
        if "allocate memory" in why:
            raise RuntimeError(why) from error
        raise BackendUnavailable(
            f"the weights of '{name}' cannot be packed or unpacked here: {why}; take another kind "
            "of weights, or the model in 16 bits"
        ) from error
    finally:
        _REPORTER.removeFilter(report)
        _REPORTER.setLevel(NOTSET)
        logging.set_verbosity(before)


class _Report(Filter):
    """Keeps what is logged to itself.

    conversion_error: what the first error says that it tells of; None for none.
    """

    conversion_error: str | None = None

    def filter(self, record: LogRecord) -> bool:
        found = _CONVERSION_ERROR.search(record.getMessage())
        if found is not None and self.conversion_error is None:
            self.conversion_error = reason(RuntimeError(found[1]))
        return False


def check_tensors(name: str, info: dict[str, Any]) -> None:
    """Raises ModelNotFoundError unless the files hold the model's tensors and nothing else.

    transformers fills what is missing with random numbers, and has left out already what a model
    may lack or ignore: tied weights, buffers that are computed, keys a class lists as harmless.
    """
    shapes = {key: (stored, wanted) for key, stored, wanted in info["mismatched_keys"]}
    found = [
        _listed("missing from the files", set(info["missing_keys"]) - shapes.keys()),
        _listed(
            "of another shape",
            shapes,
            lambda key: f"{key} is {list(shapes[key][0])} instead of {list(shapes[key][1])}",
        ),
        _listed("unknown to the model", info["unexpected_keys"]),
    ]
    if any(found):
        raise ModelNotFoundError(
            f"model '{name}' has weights that do not fit its config.json: "
            f"{'; '.join(filter(None, found))}; get both from one place, or load the model with "
            "transformers and pass it in place of its name"
        )


def _listed(what: str, keys: Collection[str], describe: Callable[[str], str] = str) -> str:
    """'2 tensors are WHAT (first, second)'; empty where there are none."""
    if not keys:
        return ""
    first = sorted(keys, key=_by_number)[:_NAMED]
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    count = "1 tensor is" if len(keys) == 1 else f"{len(keys)} tensors are"
    return f"{count} {what} ({', '.join(map(describe, first))}{more})"


def _by_number(key: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"\.", key)]
