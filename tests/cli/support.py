"""A model folder small enough for the command line's tests, and a way to call the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from hybrid_kv.cli.main import app
from hybrid_kv.report.schema import Report, parse_report
from scripts.needle.tokenizer import build_tokenizer

MAX_CONTEXT = 1024
PROMPT = "the river. key 3f a0: 11 5c 9e 07. the hill."
TINY = ("random:tiny", "--prompt-tokens", "100", "--max-new-tokens", "4")


def save_model(folder: Path) -> Path:
    """A random Llama that reads the needle language, with `MAX_CONTEXT` positions."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=MAX_CONTEXT,
        bos_token_id=1,
        eos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def call(*words: object, stdin: str | None = None) -> Result:
    """The command with these words, in this process."""
    return CliRunner().invoke(app, [str(word) for word in words], input=stdin)


def report_of(result: Result) -> Report:
    """The report that is all of stdout."""
    assert result.exit_code == 0, result.output
    json.loads(result.stdout)  # one document and nothing else
    return parse_report(result.stdout)


def run_of(result: Result) -> Any:
    """The report of `generate`, for reading its keys."""
    return report_of(result)


def refused(*words: object, code: int = 2, stdin: str | None = None) -> str:
    """The error sentence of a call that must fail with `code`, on stderr and in one line."""
    result = call(*words, stdin=stdin)
    assert result.exit_code == code, (result.exit_code, result.output)
    assert "Traceback" not in result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def words_of_ours(stderr: str) -> str:
    """What a command wrote, without Triton 3.9's words (torch imports it) as a process ends."""
    return stderr.partition("nanobind: leaked ")[0]
