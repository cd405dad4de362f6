"""Every method: a context that is asked, continued and cut equals fresh eager attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError
from hybrid_kv.models.cache_state import passing
from tests.contracts.architectures import build, build_on_host, strict_torch
from tests.contracts.edges.test_forks import CELLS, drawn
from tests.contracts.test_generate_matrix import PROMPT
from tests.kit import cache_of

NEW = 2


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with strict_torch():
        yield
    torch.set_num_threads(threads)


@cache
def fresh(architecture: str, ids: tuple[int, ...]) -> list[int]:
    """Greedy tokens behind ids, by transformers alone."""
    model = build_on_host(architecture)
    prompt = torch.tensor([ids])
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        **passing(DynamicCache(config=model.config)),
        max_new_tokens=NEW,
        do_sample=False,
    )
    return found[0, len(ids) :].tolist()


@pytest.mark.parametrize(("method", "settings", "architecture"), CELLS)
def test_what_a_context_grows_by_counts_as_if_it_had_been_there(
    method: str, settings: dict[str, Any], architecture: str
) -> None:
    config = hkv.HybridConfig.from_settings(settings).opened()
    with hkv.load(build(architecture), config=config) as llm:
        ids = drawn(0, PROMPT)[0].tolist()
        context = llm.context(ids)

        def ask(seed: int, keep: bool) -> None:
            nonlocal ids
            question = drawn(seed, 4)[0].tolist()
            answer = context.ask(question, keep=keep, max_new_tokens=NEW).token_ids
            assert answer == fresh(architecture, (*ids, *question))
            ids = [*ids, *question, *answer] if keep else ids
            assert context.ids[0].tolist() == ids
            assert cache_of(context).get_seq_length() == len(ids)
            cache_of(context).check_integrity()

        ask(1, keep=True)
        more = drawn(2, 23)[0].tolist()
        assert context.append(more) == 23
        ids += more
        ask(3, keep=False)  # leaves no trace
        assert context.append([5]) == 1  # a single token is exact as well
        ids.append(5)
        fork = context.fork()
        if cache_of(context).can_crop:
            context.truncate(len(ids) - 21)
            del ids[-21:]
            assert context.append(more) == 23
            ids += more
        else:
            with pytest.raises(ConfigError, match="must still have what came before token"):
                context.truncate(5)
        ask(4, keep=False)
        cache_of(fork).check_integrity()
