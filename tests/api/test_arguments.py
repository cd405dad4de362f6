"""What users write by mistake: one sentence that says what to write instead, before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
)

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.profiling import ProfileArguments
from hybrid_kv.planning.plan import Option
from hybrid_kv.planning.rates import measure_rates
from tests.models.folder import model, tokenizer

IDS = [3, 4, 5, 6, 7, 8, 9, 10, 11, 3, 7, 4, 3, 11, 10, 6, 5]
TIERED: dict[str, Any] = {"page_size": 4, "sink_tokens": 4, "window_tokens": 8, "top_k": "all"}


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return model()


@pytest.fixture(scope="module")
def llm(plain: PreTrainedModel) -> Iterator[Any]:
    with hkv.load(plain, config=TIERED, tokenizer=tokenizer()) as loaded:
        yield loaded


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


# Unknown keywords

CALLS: dict[str, Callable[..., Any]] = {
    "load": lambda llm, **kw: hkv.load("needle", **kw),
    "plan": lambda llm, **kw: hkv.plan("needle", 100, **kw),
    "attach": lambda llm, **kw: hkv.attach(llm.model, **kw),
    "detach": lambda llm, **kw: hkv.detach(llm.model, **kw),
    "HybridCache": lambda llm, **kw: hkv.HybridCache(llm.model, **kw),
    "Attachment.cache": lambda llm, **kw: llm.runtime.cache(**kw),
    "generate": lambda llm, **kw: llm.generate(IDS, **kw),
    "LLM.conversation": lambda llm, **kw: llm.conversation(**kw),
    "LLM.context": lambda llm, **kw: llm.context(IDS, **kw),
    "send": lambda llm, **kw: llm.conversation().send("sea", **kw),
    "ask": lambda llm, **kw: llm.context(IDS).ask("sea", **kw),
}
WITH_CONFIG = {"load", "plan", "attach", "HybridCache", "Attachment.cache"}


@pytest.mark.parametrize("name", CALLS)
def test_a_setting_of_the_cache_is_shown_where_it_belongs(llm: Any, name: str) -> None:
    text = refusal(lambda: CALLS[name](llm, method="quest"))
    assert "has no keyword 'method', which is a setting of the cache; write config={" in text
    place = "" if name in WITH_CONFIG else " where the model is loaded or attached"
    assert text.endswith(f"write config={{'method': 'quest'}}{place}")


@pytest.mark.parametrize(
    ("name", "keyword", "text"),
    [
        (
            "load",
            "devcie",
            "load has no keyword 'devcie'; did you mean 'device'? known: cache_dir, ",
        ),
        (
            "load",
            "page_tokens",
            "did you mean 'page_size', a setting of the cache? write config={'p",
        ),
        ("plan", "wieghts", "plan has no keyword 'wieghts'; did you mean 'weights'?"),
        ("plan", "top_k", "write config={'top_k': 7}"),
        ("attach", "confg", "attach has no keyword 'confg'; did you mean 'config'?"),
        ("HybridCache", "confg", "HybridCache has no keyword 'confg'; did you mean 'config'?"),
        ("generate", "max_tokens", "generate has no keyword 'max_tokens'; did you mean 'max_"),
        ("generate", "temprature", "did you mean 'temperature'? known: assistant_model, "),
        ("send", "seeed", "did you mean 'seed'?"),
        ("ask", "repetition_penalti", "did you mean 'repetition_penalty'?"),
        ("LLM.conversation", "zzz", "LLM.conversation has no keyword 'zzz'; known: "),
    ],
)
def test_an_unknown_keyword_has_the_nearest_name(
    llm: Any, name: str, keyword: str, text: str
) -> None:
    assert text in refusal(lambda: CALLS[name](llm, **{keyword: 7}))


def test_what_is_suggested_works(plain: PreTrainedModel) -> None:
    hkv.HybridCache(plain, config={"cold.top_k": 7, "method": "hybrid"})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"context": [64]}, "unknown setting 'context'; did you mean 'contexts'?"),
        ({"config": "qest"}, "unknown method 'qest'; did you mean 'quest'?"),
        ({"config": {"top_kk": 3}}, "did you mean 'top_k'?"),
        ({"config": 3}, "config must be a HybridConfig, a dict of its settings or the name"),
        ({"config": "quest", "methods": ["full"]}, "config and methods are both given; keep one"),
        ({"new_tokens": True}, "new_tokens must not be true or false"),
    ],
)
def test_a_profile_is_asked_for_by_names_that_it_has(values: dict[str, Any], text: str) -> None:
    assert text in refusal(lambda: ProfileArguments.of({"model": "needle", **values}))


# A configuration in every spelling


@pytest.mark.parametrize(
    "config",
    [hkv.HybridConfig(method="quest", page_budget=8), {"method": "quest", "page_budget": "8"}],
    ids=["object", "dict"],
)
def test_every_call_takes_a_configuration_in_any_spelling(config: Any) -> None:
    plain, wanted = model(), hkv.HybridConfig(method="quest", page_budget=8)
    with hkv.load(plain, config=config) as loaded:
        assert loaded.config == wanted
        assert loaded.runtime.cache(config).kv.config == wanted
    with hkv.attach(plain, config) as runtime:
        assert runtime.config == wanted
    assert hkv.HybridCache(plain, config).kv.config == wanted
    asked = ProfileArguments.of({"model": "needle", "config": config})
    assert asked.configs() == {"quest": wanted.replace(index_build="wait")}


def test_the_name_of_a_method_is_a_configuration() -> None:
    with hkv.load(model(), config="quest") as loaded:
        assert loaded.config == hkv.HybridConfig(method="quest")
    asked = ProfileArguments.of({"model": "needle", "config": "full"})
    assert asked.methods == ("full",)


def test_a_plan_takes_a_configuration_in_any_spelling() -> None:
    rates = measure_rates(torch.device("cpu"))

    def options(config: Any) -> tuple[Option, ...]:
        return hkv.plan("needle", 4096, config=config, rates=rates, host_bytes=2**34).options

    wanted = options(hkv.HybridConfig(window_tokens=512, top_k=7))
    assert options({"window_tokens": "512", "cold": {"top_k": 7}}) == wanted
    assert options("hybrid") == options(None) != wanted


# Types of arguments


@pytest.mark.parametrize(
    "wrong",
    [None, 3, b"needle", "", torch.nn.Linear(2, 2), PreTrainedModel, {"model": 1}],
    ids=repr,
)
def test_a_model_is_a_name_a_path_or_a_loaded_model(wrong: Any) -> None:
    assert refusal(lambda: hkv.load(wrong)).startswith("model must be a ")


@pytest.mark.parametrize("wrong", [None, 3, b"needle", torch.nn.Linear(2, 2)], ids=repr)
def test_a_plan_is_made_for_a_name_or_a_path(wrong: Any) -> None:
    assert refusal(lambda: hkv.plan(wrong, 100)).startswith("model must be a folder, a GGUF file")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tokenizer": "gpt2"}, "tokenizer must be a loaded one, got 'gpt2'; load it with "),
        ({"config": 7}, "config must be a HybridConfig, a dict of its settings or the name of a"),
        ({"layers": True}, "layers must be a whole number of at least 1, got True"),
        ({"layers": "2"}, "layers must be a whole number of at least 1, got '2'"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"dtype": 32}, "dtype must be one of float32, bfloat16, float16, got 32"),
        ({"device": 1.5}, "device must be like 'cpu' or 'cuda:0', got '1.5'"),
    ],
)
def test_loading_checks_its_options(options: dict[str, Any], text: str) -> None:
    assert refusal(lambda: hkv.load("random:tiny", **options)).startswith(text)


PROMPTS: list[tuple[Any, str]] = [
    (None, "{} must be text, token ids or a tensor of them, got None; pass a list"),
    (7, "{} must be text, token ids or a tensor of them, got 7; pass a list"),
    (b"sea", "{} must be text, token ids or a tensor of them, got a bytes; decode it"),
    (True, "{} must be text, token ids or a tensor of them, got True; "),
    ([3.5, 4.0], "{} must be text, token ids or a tensor of them, got torch.float32; pass whole"),
    (torch.tensor([1.0]), "{} must be text, token ids or a tensor of them, got torch.float32; "),
    (np.array([True]), "{} must be text, token ids or a tensor of them, got torch.bool; pass who"),
    ({"input_ids": [[3]]}, "{} must be text, token ids or a tensor of them, got a dict; pass its "),
    (object(), "{} must be text, token ids or a tensor of them, got a object of something else"),
    (torch.zeros(1, 1, 3, dtype=torch.long), "{} must be [tokens] or [1, tokens], got shape [1, 1"),
    (torch.tensor(3), "{} must be [tokens] or [1, tokens], got shape []"),
    ([[3], [4]], "{} must be one sequence of token ids, got 2 rows; for a batch call model.gene"),
    ([], "{} is empty; pass at least one token"),
    (torch.zeros(1, 0, dtype=torch.long), "{} is empty; pass at least one token"),
    ([12], "token ids must be 0..11, got 12..12; take the model's own tokenizer"),
]


@pytest.mark.parametrize(("wrong", "text"), PROMPTS, ids=[str(idx) for idx in range(len(PROMPTS))])
def test_prompts_are_text_or_whole_numbers(llm: Any, wrong: Any, text: str) -> None:
    context = llm.context(IDS)
    assert refusal(lambda: llm.generate(wrong)).startswith(text.format("prompt"))
    assert refusal(lambda: llm.context(wrong)).startswith(text.format("prompt"))
    assert refusal(lambda: context.ask(wrong)).startswith(text.format("question"))


@pytest.mark.parametrize("wrong", [None, 3, b"sea", IDS], ids=repr)
def test_a_message_is_text(llm: Any, wrong: Any) -> None:
    assert refusal(lambda: llm.conversation().send(wrong)).startswith("message must be text, got ")


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_ids_of_other_libraries_are_taken(llm: Any, kind: Any) -> None:
    want = llm.generate(IDS, max_new_tokens=3).token_ids
    assert llm.generate(np.array(IDS, dtype=kind), max_new_tokens=np.int64(3)).token_ids == want
    assert llm.context(IDS[:-2]).ask(IDS[-2:], max_new_tokens=3).token_ids == want


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_new_tokens": True}, "max_new_tokens must be a whole number of at least 1, got True"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be a whole number of at least 1, got 2.0"),
        ({"max_new_tokens": "9"}, "max_new_tokens must be a whole number of at least 1, got '9'"),
        ({"max_new_tokens": None}, "max_new_tokens must be a whole number of at least 1, got None"),
        ({"max_new_tokens": -3}, "max_new_tokens must be at least 1, got -3"),
        ({"temperature": -1}, "temperature must be a number of at least 0, got -1"),
        ({"temperature": float("nan")}, "temperature must be a number of at least 0, got nan"),
        ({"temperature": "1", "do_sample": True}, "temperature must be a number of at least 0"),
        ({"seed": 1.5}, "seed must be a whole number of at least 0, got 1.5"),
        ({"seed": False}, "seed must be a whole number of at least 0, got False"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": 2**64}, "seed must be less than 2**64, got 18446744073709551616"),
        ({"stop": 3}, "stop must be a string or a list of strings, got 3"),
        ({"stop": b"x"}, "stop must be a string or a list of strings, got a bytes"),
        ({"stop": ["sea", None]}, "stop must hold strings only, got None in it"),
        ({"stop": ["sea", ""]}, "stop strings must not be empty"),
        ({"on_prefill": 3}, "on_prefill must be a function of (done, total), got 3"),
        ({"cancel": True}, "cancel must be a threading.Event, got True"),
        ({"generation_config": {"top_k": 3}}, "generation_config must be transformers' Generatio"),
    ],
)
def test_options_are_of_their_types(llm: Any, options: dict[str, Any], text: str) -> None:
    assert refusal(lambda: llm.generate(IDS, **options)).startswith(text)


# What one call with one cache and one answer is not asked for


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_return_sequences", 2),
        ("return_dict_in_generate", True),
        ("cache", ()),
        ("past_key_values", ()),
        ("streamer", object()),
        ("output_scores", True),
        ("use_cache", False),
        ("attention_mask", [[1]]),
        ("max_length", 99),
        ("stop_strings", ["sea"]),
        ("cache_implementation", "static"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_way_out(llm: Any, name: str, value: Any) -> None:
    text = refusal(lambda: llm.generate(IDS, **{name: value}))
    assert text.startswith(f"{name} cannot be served here, got ")
    assert "; " in text


def test_what_asks_for_nothing_is_no_mistake(llm: Any) -> None:
    want = llm.generate(IDS, max_new_tokens=3).token_ids
    asked: dict[str, Any] = {
        "num_return_sequences": 1,
        "return_dict_in_generate": False,
        "cache": None,
        "past_key_values": None,
        "use_cache": True,
        "generation_config": None,
        "stopping_criteria": None,
    }
    assert llm.generate(IDS, max_new_tokens=3, **asked).token_ids == want


def test_a_generation_config_is_taken_and_keywords_come_first(llm: Any) -> None:
    """Regression: its max_new_tokens was ignored."""
    wanted = GenerationConfig(max_new_tokens=5, do_sample=False)
    assert len(llm.generate(IDS, generation_config=wanted).token_ids) == 5
    assert len(llm.generate(IDS, generation_config=wanted, max_new_tokens=2).token_ids) == 2
    several = GenerationConfig(num_beams=2, num_return_sequences=2)
    assert "num_return_sequences" in refusal(lambda: llm.generate(IDS, generation_config=several))


def test_a_model_whose_own_defaults_ask_for_more_still_answers_once(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: its answer was cut out of an output of another type."""
    want = llm.generate(IDS, max_new_tokens=3).token_ids
    monkeypatch.setattr(llm.model.generation_config, "return_dict_in_generate", True)
    assert llm.generate(IDS, max_new_tokens=3).token_ids == want


class AfterTwo(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.full((1,), input_ids.shape[1] >= len(IDS) + 2)


def test_criteria_of_the_caller_end_an_answer_too(llm: Any) -> None:
    """Regression: a TypeError said that the keyword came twice."""
    assert len(llm.generate(IDS, max_new_tokens=9, stopping_criteria=[AfterTwo()]).token_ids) == 2
