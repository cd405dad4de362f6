"""Schemas of requests, strictly, and refusals in OpenAI's JSON form.

Wrong types, unknown names and settings that are not served are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from hybrid_kv.errors import (
    BusyError,
    CapacityError,
    ConfigError,
    DeviceMemoryError,
    HybridKVError,
    nearest_name,
    said,
)
from hybrid_kv.serve.grammars import ANY_OBJECT, GrammarText

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_NEVER_AGAIN = {"x-should-retry": "false"}
"""Keeps OpenAI's client from order again what will fail again."""


@dataclass
class ApiError(Exception):
    """A refusal: status, one sentence, the parameter that is wrong and a word for programs.

    partial: texts of the choices as far as they had come; None where none had begun.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    partial: list[str] | None = None

    @property
    def body(self) -> dict[str, Any]:
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, usual)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error if self.partial is None else {**error, "partial": self.partial}}

    def response(self) -> Response:
        """The whole answer."""
        # A name that was refused may hold half a character: escaped, it can still be quoted.
        content = json.dumps(self.body, ensure_ascii=True).encode()
        return Response(content, self.status, dict(self.headers), "application/json")


def api_error(error: Exception) -> ApiError:
    """Translates an error of the package for the client; others are 500 and say nothing more."""
    retry_after = getattr(error, "retry_after_s", None)
    if retry_after is not None:
        wait = {"retry-after": str(max(1, math.ceil(retry_after)))}
        return ApiError(429, str(error), code="queue_full", headers=wait)
    match error:
        case ApiError():
            return error
        case DeviceMemoryError() | BusyError():
            return ApiError(503, str(error), code="no_room_now", headers={"retry-after": "5"})
        case CapacityError():
            return ApiError(400, str(error), code="never_fits")
        case ConfigError():
            return ApiError(400, str(error))
        case HybridKVError():
            return ApiError(500, str(error), code="failed", headers=_NEVER_AGAIN)
    message = "an unexpected error ended the request; the server's log has the details"
    return ApiError(500, message, code="internal_error", headers=_NEVER_AGAIN)


def ended_early(
    reason: str, error: HybridKVError | None, tokens: int = 0, partial: list[str] | None = None
) -> ApiError:
    """Of a request that ended without its answer: by an error, out of time, or cancelled.

    Args:
        tokens: that it had given. partial: their texts, where they have not gone out.
    """
    if error is not None:
        return api_error(error)
    if reason == "timeout":
        when = f"after {tokens:,} tokens" if tokens else "before its first token"
        way = "ask for fewer" if tokens else "shorten the prompt"
        return ApiError(
            504,
            f"the request ran out of time {when}; {way} or raise the server's --timeout",
            code="timeout",
            headers=_NEVER_AGAIN,
            partial=partial if tokens else None,
        )
    return ApiError(503, "the server is shutting down; ask again later", code="shutting_down")


MOST_CHOICES = 16
"""Answers of one request: prompts times `n`."""

ANYTHING = object()
"""Stands for every value of what changes no answer."""

_UNSERVED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "cache_salt": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "metadata": (ANYTHING,),
    "prompt_cache_key": (ANYTHING,),
    "prompt_cache_retention": (ANYTHING,),
    "safety_identifier": (ANYTHING,),
    "user": (ANYTHING,),
}
"""Settings of others, with the values (None apart) that ask for what is done anyway."""


_IGNORE: ContextVar[Callable[[str], None] | None] = ContextVar("ignore", default=None)


@contextmanager
def lenient(ignored: Callable[[str], None]) -> Iterator[None]:
    """A block in which settings that are not served are ignored; `ignored` is called with each."""
    before = _IGNORE.set(ignored)
    try:
        yield
    finally:
        _IGNORE.reset(before)


class StrictSchema(BaseModel):
    """A part of a request; unknown names are refused with the nearest known one.

    In a `lenient` block names that are not served are ignored.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    unserved: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known_and_served(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        known = {field.alias or name: name for name, field in cls.model_fields.items()}
        kept, ignore = {}, _IGNORE.get()
        for name, value in data.items():
            if name in known:
                kept[name] = value
                continue
            try:
                if name not in cls.unserved:
                    raise refusal(
                        f"unknown setting '{name}'; {_did_you_mean(name, known)}known: "
                        f"{', '.join(sorted(known))}",
                        name,
                    )
                cls._refuse_unserved(name, value)
            except PydanticCustomError:
                if ignore is None:
                    raise
                ignore(name)
        return kept

    @classmethod
    def _refuse_unserved(cls, name: str, value: object) -> None:
        harmless = cls.unserved[name]
        same = any(value is it or (_plain(value) == _plain(it)) for it in harmless)
        if value is not None and ANYTHING not in harmless and not same:
            only = " or ".join(map(repr, harmless)) or "null"
            raise refusal(
                f"'{name}' is not served here, got {said(value)}; leave it out or write {only}",
                name,
            )


def _plain(value: object) -> object:
    """A value that equals others of its type only: True is not 1."""
    return (isinstance(value, bool), value)


def refusal(sentence: str, name: str) -> PydanticCustomError:
    """An error of a validator, which says the sentence about the setting of this name."""
    # The sentence goes in as a value: what is in braces in a template would be filled in.
    context = {"sentence": _encodable(sentence), "name": _encodable(name)}
    return PydanticCustomError("refused", "{sentence}", context)


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _did_you_mean(name: str, known: Mapping[str, object]) -> str:
    near = nearest_name(name, known)
    return f"did you mean '{near}'? " if near else ""


def first_problem(errors: list[Any]) -> tuple[str, str | None]:
    """One sentence about the first problem of a validation, and the name that it is about."""
    problem = errors[0]
    context = problem.get("ctx") or {}
    place = [str(part) for part in problem["loc"] if part != "body"]
    if problem["type"] == "refused":
        # The sentence is about a member of a union at most: its type is no name.
        names = [part for part in [*place, context["name"]] if part and "[" not in part]
        return context["sentence"], ".".join(names)
    if problem["type"].startswith("json_"):
        return f"body must be JSON, got what cannot be read: {context.get('error', '')}", None
    # Members of a union are named in the middle of a place: those are types, not names.
    names = [part for part in place if part.isidentifier() and part not in _MEMBERS]
    name = names[0] if names else "body"
    if problem["type"] in _LENGTHS:
        word, bound = _LENGTHS[problem["type"]]
        size, got = f"{word} {context[bound]}", len(problem["input"])
        return f"{name} must have a length of {size}, got {got}", ".".join(names) or None
    text = str(problem["msg"])
    if len({tuple(error["loc"][:2]) for error in errors}) == 1 and len(errors) > 1:
        kinds = dict.fromkeys(str(error["msg"]).lower() for error in errors)
        text = "; or: ".join(kinds)
    given = "" if problem["type"] == "missing" else f", got {said(problem['input'])[:200]}"
    return f"{name}: {text[:1].lower()}{text[1:400]}{given}", ".".join(names) or None


_LENGTHS = {"too_short": ("at least", "min_length"), "too_long": ("at most", "max_length")}
_MEMBERS = {"str", "int", "float", "bool", "list", "dict", "none", "TextPart", "NamedTool"}


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise refusal("text must be whole characters, got half of a surrogate pair", "") from None
    return text


Text: TypeAlias = Annotated[str, AfterValidator(_whole_characters)]


class StreamOptions(StrictSchema):
    """include_usage: a last chunk has the usage."""

    unserved = {"include_obfuscation": (False, True)}

    include_usage: bool | None = None


class Extensions(StrictSchema):
    """Fields that OpenAI's interface has no words for, under `hybrid_kv`.

    method, set: in place of the server's; set has dotted names as `--set`. budget: tokens that a
    step attends, or a share of the context such as "2%". audit: decode steps from one look to the
    next. places: report where in the prompt the answer looked. exact: every token is full
    attention's; the method drafts them. max_error: tokens whose expected KL is larger, in nats, are
    full attention's. errors: report the error of each token.
    """

    method: str | None = None
    set: dict[str, JsonValue] | None = None
    budget: Annotated[int, Field(ge=1)] | str | None = None
    audit: Annotated[int, Field(ge=0)] | None = None
    places: bool = False
    exact: bool = False
    max_error: FiniteFloat | None = None
    errors: bool = False


class NamedSchema(StrictSchema):
    """A JSON schema with a name, which changes nothing, nor does `strict`: all are kept to."""

    unserved = {"description": (ANYTHING,), "name": (ANYTHING,), "strict": (ANYTHING,)}

    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(StrictSchema):
    """The form of an answer: text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            got = "none" if self.json_schema is None else f"it with type '{self.type}'"
            raise refusal(f"json_schema belongs to type 'json_schema', got {got}", "json_schema")
        return self

    @property
    def schema_asked(self) -> dict[str, Any] | None:
        """JSON schema of the answer; None for text."""
        named = self.json_schema
        return named.schema_ if named else ANY_OBJECT if self.type == "json_object" else None


class Structure(StrictSchema):
    """Grammar of an answer in vLLM's words, of which one is given."""

    json_: Annotated[dict[str, Any] | Text | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=1000)] | None = None
    grammar: Text | None = None

    @property
    def grammars(self) -> list[GrammarText]:
        """All that were given."""
        found = [] if self.json_ is None else [GrammarText("json", _as_text(self.json_))]
        found += [GrammarText.of_schema(ANY_OBJECT)] if self.json_object else []
        found += [] if self.regex is None else [GrammarText("regex", self.regex)]
        found += [] if self.choice is None else [GrammarText.of_choices(self.choice)]
        return found + ([] if self.grammar is None else [GrammarText("lark", self.grammar)])


def _as_text(schema: dict[str, Any] | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


Ids: TypeAlias = list[Annotated[int, Field(ge=0, lt=2**31)]]
Penalty: TypeAlias = Annotated[FiniteFloat, Field(ge=-2, le=2)]
Stops: TypeAlias = Text | Annotated[list[Text], Field(max_length=16)]


class Generating(StrictSchema):
    """Fields that chats and completions share."""

    unserved = _UNSERVED

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: Stops | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[FiniteFloat, Field(ge=-100, le=100)]] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structure | None = None
    hybrid_kv: Extensions | None = None

    @model_validator(mode="after")
    def _stops_and_options(self) -> Generating:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in stops:
            raise refusal("stop must not hold an empty text; leave it out to have none", "stop")
        if self.stream_options is not None and not self.stream:
            raise refusal(
                "stream_options needs stream, got it without; leave it out", "stream_options"
            )
        if (asked := len(self._grammars)) > 1:
            raise refusal(
                f"an answer keeps to one schema or grammar, got {asked}; leave the others out",
                "structured_outputs",
            )
        wrong = [token for token in self.logit_bias or {} if not token.isdecimal()]
        if wrong:
            raise refusal(
                f"logit_bias must have token ids as names, got {said(wrong[0])}", "logit_bias"
            )
        return self

    @property
    def grammar(self) -> GrammarText | None:
        """Grammar that the answer keeps to; None for any text."""
        return next(iter(self._grammars), None)

    @property
    def _grammars(self) -> list[GrammarText]:
        asked = None if self.response_format is None else self.response_format.schema_asked
        found = [] if asked is None else [GrammarText.of_schema(asked)]
        return found + (self.structured_outputs.grammars if self.structured_outputs else [])

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(Generating):
    """POST /v1/completions."""

    unserved = {**_UNSERVED, "tools": ([],), "tool_choice": ("none", "auto")}

    prompt: Text | Ids | list[Text] | list[Ids]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more, each text or token ids."""
        many: Any = self.prompt
        single = isinstance(many, str) or (bool(many) and isinstance(many[0], int))
        return [many] if single else many
