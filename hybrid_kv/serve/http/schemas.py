"""Schemas of requests, strictly: wrong types, unknown names and what is not served are refused."""

from __future__ import annotations

from collections.abc import Mapping
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

from hybrid_kv.errors import nearest_name, said

MOST_CHOICES = 16
"""Answers of one request: prompts times `n`."""

ANYTHING = object()
"""Stands for every value of what changes no answer."""

_UNSERVED: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "cache_salt": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
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


class StrictSchema(BaseModel):
    """A part of a request; unknown names are refused with the nearest known one."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    unserved: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known_and_served(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name in cls.unserved:
                cls._refuse_unserved(name, value)
            else:
                raise _refusal(
                    f"unknown setting '{name}'; {_did_you_mean(name, cls.model_fields)}known: "
                    f"{', '.join(sorted(cls.model_fields))}",
                    name,
                )
        return kept

    @classmethod
    def _refuse_unserved(cls, name: str, value: object) -> None:
        harmless = cls.unserved[name]
        same = any(value is it or (_plain(value) == _plain(it)) for it in harmless)
        if value is not None and ANYTHING not in harmless and not same:
            only = " or ".join(map(repr, harmless)) or "null"
            raise _refusal(
                f"'{name}' is not served here, got {said(value)}; leave it out or write {only}",
                name,
            )


def _plain(value: object) -> object:
    """A value that equals others of its type only: True is not 1."""
    return (isinstance(value, bool), value)


def _refusal(sentence: str, name: str) -> PydanticCustomError:
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
_MEMBERS = {"str", "int", "float", "bool", "list", "dict", "none", "TextPart"}


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _refusal("text must be whole characters, got half of a surrogate pair", "") from None
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
    attention's; the method drafts them.
    """

    method: str | None = None
    set: dict[str, JsonValue] | None = None
    budget: Annotated[int, Field(ge=1)] | str | None = None
    audit: Annotated[int, Field(ge=0)] | None = None
    places: bool = False
    exact: bool = False


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
    hybrid_kv: Extensions | None = None

    @model_validator(mode="after")
    def _stops_and_options(self) -> Generating:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in stops:
            raise _refusal("stop must not hold an empty text; leave it out to have none", "stop")
        if self.stream_options is not None and not self.stream:
            raise _refusal(
                "stream_options needs stream, got it without; leave it out", "stream_options"
            )
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class TextPart(StrictSchema):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


class ChatMessage(StrictSchema):
    """A message: text, whole or in parts."""

    unserved = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "name": (),
        "reasoning": (),
        "reasoning_content": (),
        "refusal": (),
        "tool_call_id": (),
        "tool_calls": ([],),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]

    def rendered(self) -> dict[str, str]:
        """As chat templates take it."""
        whole = self.content
        text = whole if isinstance(whole, str) else "".join(part.text for part in whole)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Generating):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _settings_agree(self) -> ChatRequest:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise _refusal(
                f"max_tokens and max_completion_tokens must agree, got {self.max_tokens} and "
                f"{self.max_completion_tokens}; leave max_tokens out",
                "max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise _refusal(
                "top_logprobs needs logprobs, got it without; add 'logprobs': true", "top_logprobs"
            )
        return self


Ids: TypeAlias = list[Annotated[int, Field(ge=0, lt=2**31)]]


class CompletionRequest(Generating):
    """POST /v1/completions."""

    prompt: Text | Ids | list[Text] | list[Ids]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more, each text or token ids."""
        many: Any = self.prompt
        single = isinstance(many, str) or (bool(many) and isinstance(many[0], int))
        return [many] if single else many


class TokenizeRequest(StrictSchema):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise _refusal("one of prompt and messages is expected; give one of them", "prompt")
        return self
