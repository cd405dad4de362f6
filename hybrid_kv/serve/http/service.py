"""HTTP requests parsed to requests of the engine, and the open ones by their id.

Fields that are not served are refused, or ignored where clients send them without meaning it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import UnionType
from typing import Any, Protocol, Union, get_args, get_origin

from pydantic import BaseModel

from hybrid_kv.config import HybridConfig, PluginConfig, budget_tokens
from hybrid_kv.errors import ConfigError
from hybrid_kv.methods.retrieval import split_budget
from hybrid_kv.models.cache_layers import max_context
from hybrid_kv.serve.grammars import GrammarText
from hybrid_kv.serve.http.chat import CallForm, ChatRequest, in_plain_words
from hybrid_kv.serve.http.metrics import Metrics, answered
from hybrid_kv.serve.http.schemas import (
    MOST_CHOICES,
    ApiError,
    CompletionRequest,
    Extensions,
    Generating,
)
from hybrid_kv.serve.http.tokenizer import ServedModel, Texts
from hybrid_kv.serve.requests import (
    EngineStats,
    Finished,
    Limits,
    Reason,
    Request,
    RequestHandle,
    Sampling,
)

USUAL_CHAT_TOKENS = 1024
"""Of an answer in a chat whose request says nothing, where the context has room."""

USUAL_COMPLETION_TOKENS = 16
"""Of a completion; what OpenAI's interface says."""

_LEAST_KEYS = 128
"""Chosen by a head where a request asks for a share: what is lost follows the number of keys, KL
.018 with 21 of them and .0009 with 128 (docs/results.md)."""


class AnyEngine(Protocol):
    """Interface of the engine that the service needs."""

    limits: Limits

    def submit(self, request: Request) -> RequestHandle: ...

    def stats(self) -> EngineStats: ...

    def drain(self, seconds: float) -> Any: ...


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request to the server, parsed: `choices` engine requests for each prompt, in order."""

    ident: str
    created: int
    requests: list[Request]
    choices: int


@dataclass(frozen=True, slots=True)
class Ending:
    """Ends of the requests that were in work when the server was asked to end."""

    finished: list[str]
    cancelled: list[str]


class Service:
    """One model behind one engine, under one name.

    context: the longest prompt and answer together, in tokens; None where the model has no limit.
    longest_prompt: one token less, or what the server allows.

    Args:
        documents_folder: keeps the documents of the page; None for memory.
    """

    def __init__(
        self,
        llm: ServedModel,
        engine: AnyEngine,
        name: str,
        documents_folder: Path | None = None,
    ) -> None:
        self.engine, self.name, self.created = engine, name, int(time.time())
        self.documents_folder = documents_folder
        self.config = llm.config
        self.context = max_context(llm.model.config.get_text_config(decoder=True))
        limits = (self.context, engine.limits.max_prompt_tokens)
        most = min((limit for limit in limits if limit is not None), default=None)
        self.longest_prompt = most if most is None or most != self.context else most - 1
        self.texts, self.metrics = Texts(llm, most), Metrics(engine.stats)
        self.closing = False
        self._open: dict[int, tuple[str, list[RequestHandle]]] = {}
        self._numbers = count()

    # Order --------------------------------------------------------------------------------------

    async def of_chat(self, asked: ChatRequest) -> ParsedRequest:
        """Raises ConfigError or ApiError for what cannot be asked."""
        self.check_model(asked.model)
        messages = [message.rendered() for message in asked.messages]
        tools = [tool.rendered() for tool in asked.callable]
        if not self.texts.takes_tools:
            messages, tools = in_plain_words(messages, tools), []
        ids = await self.texts.encode_chat(messages, "messages", tools)
        wanted = asked.max_completion_tokens or asked.max_tokens
        room = self.check_room(len(ids), wanted or 1, "messages")
        base = Request(
            ids=ids,
            max_new_tokens=wanted or min(room, USUAL_CHAT_TOKENS),
            sampling=self._sampling(asked, (asked.top_logprobs or 0) if asked.logprobs else None),
            end_ids=self.texts.chat_end_ids,
        )
        return await self._asking("chatcmpl", asked, [base], self._grammar_of_calls(asked))

    def _grammar_of_calls(self, asked: ChatRequest) -> GrammarText | None:
        """Grammar of calls that must come, or must keep to a schema if they do."""
        functions = [tool.rendered()["function"] for tool in asked.callable]
        texts = self.texts
        form = CallForm.of(
            texts.template_text, takes_tools=texts.takes_tools, added=texts.added_words
        )
        if asked.must_call:
            several = asked.tool_choice == "required" and asked.parallel_tool_calls is not False
            return form.required(functions, several=several)
        is_strict = any(tool.function.strict for tool in asked.callable)
        return form.offered(functions) if is_strict else None

    async def of_completion(self, asked: CompletionRequest) -> ParsedRequest:
        """Raises ConfigError or ApiError for what cannot be asked."""
        self.check_model(asked.model)
        prompts = asked.prompts
        if not prompts or len(prompts) * (asked.n or 1) > MOST_CHOICES:
            raise ApiError(
                400,
                f"prompts times n must be 1 to {MOST_CHOICES} answers, got {len(prompts)} times "
                f"{asked.n or 1}; send more requests",
                "prompt",
            )
        wanted = asked.max_tokens or USUAL_COMPLETION_TOKENS
        sampling = self._sampling(asked, asked.logprobs)
        bases = []
        for prompt in prompts:
            ids = await self.texts.encode(prompt, "prompt")
            room = self.check_room(len(ids), asked.max_tokens or 1, "prompt")
            bases.append(
                Request(
                    ids=ids,
                    max_new_tokens=min(wanted, room),
                    sampling=sampling,
                    end_ids=self.texts.end_ids,
                )
            )
        return await self._asking("cmpl", asked, bases)

    async def _asking(
        self,
        kind: str,
        asked: Generating,
        bases: Sequence[Request],
        calls: GrammarText | None = None,
    ) -> ParsedRequest:
        choices, text = asked.n or 1, calls or asked.grammar
        grammar = None if text is None else await self.texts.grammar(text)
        for token in asked.stop_token_ids or ():
            self.texts.check_token(token, "stop_token_ids")
        requests = []
        for base in bases:
            ends = (*(() if asked.ignore_eos else base.end_ids), *(asked.stop_token_ids or ()))
            given = replace(base, stop=asked.stops, end_ids=ends, grammar=grammar)
            whole = self.extended(given, asked.hybrid_kv)
            requests += [_nth(whole, number) for number in range(choices)]
        return ParsedRequest(new_ident(kind), int(time.time()), requests, choices)

    def _sampling(self, asked: Generating, logprobs: int | None) -> Sampling:
        biases = [(int(token), bias) for token, bias in (asked.logit_bias or {}).items()]
        for token, _ in biases:
            self.texts.check_token(token, "logit_bias")
        return Sampling(
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=max(0, asked.top_k or 0),
            seed=asked.seed,
            logprobs=logprobs,
            min_p=asked.min_p or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            presence_penalty=asked.presence_penalty or 0.0,
            repetition_penalty=asked.repetition_penalty or 1.0,
            logit_bias=tuple(biases),
            min_tokens=asked.min_tokens or 0,
        )

    def extended(self, request: Request, asked: Extensions | None) -> Request:
        """With what the `hybrid_kv` object says.

        Raises:
            ConfigError: method or settings are wrong, or do not go together.
        """
        if asked is None:
            return request
        total = len(request.ids) + request.max_new_tokens
        config = asked_config(self.config, asked, total)
        given = replace(request, config=config, audit_every=asked.audit)
        own = {name: getattr(asked, name) for name in ("places", "exact", "max_error", "errors")}
        return replace(given, **own)

    def check_model(self, name: str) -> None:
        """Raises ApiError unless the name is the model's."""
        if name != self.name:
            raise ApiError(
                404,
                f"model must be '{self.name}', the one that is served, got {name[:100]!r}",
                "model",
                "model_not_found",
            )

    def check_room(self, prompt: int, wanted: int, param: str) -> int:
        """Tokens that an answer may have; ApiError where there is no room for `wanted`."""
        most = self.engine.limits.max_prompt_tokens
        if most is not None and prompt > most:
            raise ApiError(
                400,
                f"a prompt must be at most {most:,} tokens on this server, got {prompt:,}; shorten "
                "it",
                param,
                "context_length_exceeded",
            )
        room = 2**31 if self.context is None else self.context - prompt
        if room < wanted:
            raise ApiError(
                400,
                f"prompt and answer must fit into the model's context of {self.context:,} tokens, "
                f"got {prompt:,} and {wanted:,}; shorten the prompt or ask for fewer tokens",
                param,
                "context_length_exceeded",
            )
        return room

    # Answering -----------------------------------------------------------------------------------

    @contextmanager
    def submitted(self, order: ParsedRequest) -> Iterator[list[RequestHandle]]:
        """The tickets, in the order of the requests; whichever is open at the end is cancelled.

        Raises:
            ApiError: the server is ending.
            HybridKVError: the engine takes no more requests, or never one like this.
        """
        tickets = self.submit(order)
        try:
            yield tickets
        finally:
            self.release(tickets)

    def submit(self, order: ParsedRequest) -> list[RequestHandle]:
        """As `submitted`; `release` must follow."""
        if self.closing:
            raise ApiError(
                503, "the server is shutting down; ask again later", code="shutting_down"
            )
        tickets: list[RequestHandle] = []
        self._open[id(tickets)] = (order.ident, tickets)
        try:
            for request in order.requests:
                tickets.append(self.engine.submit(request))
        except BaseException:
            self.release(tickets)
            raise
        return tickets

    def ended(self, end: Finished) -> None:
        """A request was read to its end: its figures are taken in."""
        self.metrics.ended(end)
        answered(end.usage)

    def release(self, tickets: list[RequestHandle]) -> None:
        """Cancels what is unfinished; harmless when repeated."""
        for ticket in tickets:
            if not ticket.is_finished:
                ticket.cancel()
        if not self.closing:
            self._open.pop(id(tickets), None)

    @property
    def num_open(self) -> int:
        """Requests that have not been answered."""
        return len(self._open)

    async def end(self, seconds: float) -> Ending:
        """Takes no new requests and waits for those in work; what remains then is cancelled."""
        self.closing = True
        await asyncio.to_thread(self.engine.drain, seconds)
        ending = Ending([], [])
        for ident, tickets in self._open.values():
            whole = all(_reason(ticket) in ("stop", "length") for ticket in tickets)
            (ending.finished if whole else ending.cancelled).append(ident)
        return ending


def new_ident(kind: str) -> str:
    """'cmpl' -> 'cmpl-3f0c...'."""
    return f"{kind}-{secrets.token_hex(12)}"


def _nth(request: Request, number: int) -> Request:
    """The same for one of several answers: a seed draws each another one."""
    sampling = request.sampling
    if number == 0 or sampling.seed is None:
        return request
    seed = (sampling.seed + number) % 2**64
    return replace(request, sampling=replace(sampling, seed=seed))


def _reason(ticket: RequestHandle) -> Reason | None:
    """Reason why a ticket's request ended; None while it runs."""
    if not ticket.is_finished:
        return None
    last = list(ticket.events())[-1]
    assert isinstance(last, Finished)
    return last.reason


def asked_config(
    base: HybridConfig, asked: Extensions | None, total_tokens: int
) -> HybridConfig | None:
    """The configuration of one request; None for the server's.

    Args:
        total_tokens: what a share of the context is taken of.

    Raises:
        ConfigError: a method or setting is unknown, out of range, or would name a file.
    """
    if asked is None or (asked.method is None and not asked.set and asked.budget is None):
        return None
    settings: dict[str, Any] = dict(asked.set or {})
    if asked.method is not None:
        if "method" in settings:
            raise ConfigError("method is given twice; leave it out of set")
        settings["method"] = asked.method
    config = base.replace(**settings)
    for name in _free_texts(config):
        raise ConfigError(
            f"{name} may name a file, which no request can; give its values, or start the server "
            "with it"
        )
    if asked.budget is not None:
        config = config.at_budget(
            _budget(str(asked.budget), config.page_size, total_tokens), total_tokens
        )
    return config


def _budget(asked: str, page_size: int, total_tokens: int) -> str:
    """A budget as it was asked for; of a share at least what leaves `_LEAST_KEYS` to choose beside
    sinks, window and newest tokens.
    """
    if not asked.strip().endswith("%"):
        return asked
    sizes = count(_LEAST_KEYS + 2 * page_size + page_size // 2)  # with a page of window
    least = next(size for size in sizes if split_budget(size, page_size).rest >= _LEAST_KEYS)
    return str(max(budget_tokens(asked, total_tokens), min(least, total_tokens)))


def _free_texts(group: BaseModel, path: str = "") -> Iterator[str]:
    """Settings that hold any text, which may be a path, and not their default."""
    names = {group.name_field} if isinstance(group, PluginConfig) else set()
    for name, field in type(group).model_fields.items():
        value = getattr(group, name)
        if isinstance(value, BaseModel):
            yield from _free_texts(value, path if name == "params" else f"{path}{name}.")
        elif (
            isinstance(value, str)
            and str in _members(field.annotation)
            and value != field.default
            and name not in names | {"backend"}
        ):
            yield path + name


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, UnionType):
        return get_args(annotation)
    return (annotation,)
