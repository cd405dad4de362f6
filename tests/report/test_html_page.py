"""The page: complete, self-contained, well-formed, and nothing in a run file becomes markup."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_kv.errors import ConfigError
from hybrid_kv.report.html import numbers
from hybrid_kv.report.html.page import render
from hybrid_kv.report.html.page_entries import entries_of
from hybrid_kv.report.html.profile_page import lead
from hybrid_kv.report.html.sources import Source, drawable
from hybrid_kv.report.html.tables import limit_table, phases_tables
from hybrid_kv.report.profile import ProfileRow
from hybrid_kv.report.run import (
    AuditedHead,
    AuditReport,
    EstimateReport,
    MemoryBytes,
    PhasesMs,
)
from hybrid_kv.report.schema import ChatReport, MethodsReport
from tests.report import profiles
from tests.report.profiles import HOSTILE

TWO = EstimateReport(mean=2.0)
FAR = AuditedHead(
    layer=0, kv_head=10**15, looks=1, recall_at_k=None, missed_mass=0.1, output_error=0.1
)
VOID = {"meta", "input", "br", "col"}
SMALL = (4096, 32768)


class Page(HTMLParser):
    """What a page is made of; raises where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def values(self, name: str) -> list[str]:
        return [value for _, key, value in self.attributes if key == name]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).replace("\N{NO-BREAK SPACE}", " ").split())


DRAWN: dict[tuple[str, ...], str] = {}
"""Drawing takes seconds, and many tests look at the same documents."""


def text_of(*reports: Any) -> str:
    key = tuple(one.model_dump_json() for one in reports)
    if key not in DRAWN:
        DRAWN[key] = render([Source(one, f"run{i}.json") for i, one in enumerate(reports)])
    return DRAWN[key]


def page_of(*reports: Any) -> Page:
    return Page(text_of(*reports))


DOCUMENTS = {
    "profile": profiles.profile(SMALL),
    "synthetic": profiles.synthetic(),
    "generate": profiles.generation(),
    "chat": profiles.chat(),
    "demo": profiles.demo(),
}


@pytest.mark.parametrize("report", DOCUMENTS.values(), ids=DOCUMENTS)
def test_the_page_is_well_formed_and_its_links_lead_somewhere(report: Any) -> None:
    page = page_of(report)
    ids = page.values("id")
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    for link in page.values("href"):
        assert link.startswith("#")
        assert link[1:] in ids
    for names in (*page.values("aria-labelledby"), *page.values("aria-describedby")):
        assert set(names.split()) <= set(ids)


@pytest.mark.parametrize("report", DOCUMENTS.values(), ids=DOCUMENTS)
def test_the_page_needs_nothing_from_outside(report: Any) -> None:
    text = text_of(report)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bsrc=|<link|<img", text)
    assert "default-src 'none'" in text


def test_every_row_has_its_number_and_its_settings() -> None:
    report = profiles.profile(SMALL)
    page = page_of(report)
    for row in report.rows:
        place = f"{row.method}, {row.context_tokens // 1024}K"
        assert f"Settings of {place}" in page.text
    for row in report.rows:
        if row.tpot_ms is not None:
            assert f"{row.tpot_ms:.3g}" in page.text


def test_rows_without_a_result_say_why() -> None:
    report = profiles.profile(SMALL)
    reasons = [row.reason for row in report.rows if row.reason]
    assert len(reasons) == 3
    section = page_of(report).text.split("Rows without a full result")[1]
    section = section.split("The same measurement again")[0]
    assert all(reason in section for reason in reasons)


def test_an_interrupted_number_is_marked() -> None:
    text = page_of(profiles.profile(SMALL)).text
    assert len(re.findall(r"\S†", text)) == 2  # its TPOT and its TTFT
    assert "†" not in page_of(profiles.profile(rows=(profiles.row("flat", 4096),))).text


def test_a_synthetic_fill_and_a_cut_model_are_said_before_any_number() -> None:
    text = page_of(profiles.synthetic()).text
    before = text.split("was fastest")[0]
    assert "tokens mean nothing" in before
    assert "2 of 32 layers" in before
    assert "ended early" in before
    assert "Time to first token was not measured. KV was put in place" in text


def test_a_whole_prefilled_model_is_not_warned_of() -> None:
    text = page_of(profiles.profile(SMALL)).text
    assert "tokens mean nothing" not in text
    assert "cut down" not in text


def test_every_figure_has_a_title_and_a_description() -> None:
    page = page_of(profiles.profile(SMALL))
    assert page.count["svg"] > 10
    assert page.count["desc"] == page.count["svg"]
    assert page.values("role").count("img") == page.count["svg"]


def test_no_audit_means_no_section_on_what_was_missed() -> None:
    rows = (profiles.row("flat", 4096, audit=None), profiles.row("full", 4096))
    ids = page_of(profiles.profile(rows=rows)).values("id")
    assert "r1-latency" in ids
    assert "r1-quality" not in ids
    assert "r1-heads" not in ids


def test_a_sweep_in_which_all_failed_is_a_page_of_reasons() -> None:
    rows = tuple(
        ProfileRow(method=name, context_tokens=37, status="failed", reason=f"{name} broke")
        for name in ("flat", "ivf")
    )
    page = page_of(profiles.profile(rows=rows))
    assert "flat broke" in page.text
    assert "ivf broke" in page.text
    assert page.count["svg"] == 0


def test_a_row_that_measured_only_a_time_is_drawn() -> None:
    bare = ProfileRow(method="quest", context_tokens=37, status="ok", tpot_ms=0.37)
    page = page_of(profiles.profile(rows=(bare,)))
    assert page.count["svg"] == 1
    assert "0.370" in page.text


def test_a_method_that_comes_twice_is_told_apart() -> None:
    rows = (profiles.row("flat", 4096), profiles.row("flat", 4096, slower=2.0))
    assert "flat (2), 4K" in page_of(profiles.profile(rows=rows)).text


def test_more_methods_than_colours_are_drawn() -> None:
    rows = tuple(profiles.row(f"own_{i}", 4096) for i in range(11))
    assert "own_10" in page_of(profiles.profile(rows=rows)).text


@pytest.mark.parametrize("count", [1, 37])
def test_the_heat_map_has_a_cell_for_every_head(count: int) -> None:
    found = profiles.audit(0.02, layers=count, heads=2)
    rows = (profiles.row("flat", 4096, audit=found),)
    text = text_of(profiles.profile(rows=rows))
    assert len(re.findall(r'title="layer \d+, KV head \d+:', text)) == len(found.heads)


def test_tabs_show_one_panel_without_a_script() -> None:
    text = text_of(profiles.profile(SMALL))
    panels = max(int(number) for number in re.findall(r'class="panel p(\d+)"', text))
    assert f".tabs:has(.t{panels}:checked)>.p{panels}{{display:block}}" in text
    groups = set(re.findall(r'type="radio" name="([^"]+)"', text))
    checked = re.findall(r'name="([^"]+)" class="t\d+" checked="checked"', text)
    assert sorted(checked) == sorted(groups)


def test_nothing_of_a_profile_becomes_markup() -> None:
    row = profiles.row(
        HOSTILE,
        4096,
        status="interrupted",
        reason=HOSTILE,
        config={HOSTILE: HOSTILE, "list": [HOSTILE], "nested": {HOSTILE: [1]}},
        backends={HOSTILE: HOSTILE},
        predicted_ms={HOSTILE: 3.0},
        audit=profiles.audit(0.03, layers=2),
    )
    full = profiles.row("full", 4096)
    report = profiles.profile(
        rows=(row, full),
        model=HOSTILE,
        arguments={HOSTILE: HOSTILE},
        threads={HOSTILE: 2},
        torch=HOSTILE,
    )
    for sources in ([report], [report, report.model_copy(update={"model": "other"})]):
        page = Page(render([Source(one, f"{i}{HOSTILE}") for i, one in enumerate(sources)]))
        assert page.count["script"] == 1
        assert "src" not in {name for _, name, _ in page.attributes}
        assert HOSTILE in page.text


@pytest.mark.parametrize(
    "report",
    [
        profiles.generation(text=HOSTILE, model=HOSTILE, method=HOSTILE),
        ChatReport(environment=profiles.environment(), turns=(profiles.run(text=HOSTILE),)),
        profiles.demo().model_copy(update={"question": HOSTILE, "expected": HOSTILE}),
    ],
    ids=["generate", "chat", "demo"],
)
def test_nothing_of_a_run_becomes_markup(report: Any) -> None:
    page = page_of(report)
    assert page.count["script"] == 1
    assert HOSTILE in page.text


def test_a_conversation_has_a_line_for_every_answer() -> None:
    text = page_of(profiles.chat()).text
    assert "answer 1" in text
    assert "answer 2" in text
    assert "second answer" in text


def test_a_demo_says_how_it_ended() -> None:
    text = page_of(profiles.demo()).text
    assert "? key 3f a0" in text
    assert "the same tokens" in text
    assert "One layer of Llama-3-8B at 131,072 tokens, a step" in text
    assert "70.0 ms full, 14.0 ms hybrid, 92.2% of the mass" in text
    wrong = profiles.demo().model_copy(update={"agree": False})
    assert "different tokens" in page_of(wrong).text


def test_several_documents_share_a_page() -> None:
    page = page_of(profiles.profile(SMALL), profiles.demo())
    assert {"r1-latency", "r2-numbers"} <= set(page.values("id"))
    assert not any(ident.startswith("c") for ident in page.values("id"))  # nothing to compare


def test_a_document_without_runs_is_refused() -> None:
    empty = ChatReport(environment=profiles.environment(), turns=())
    with pytest.raises(ConfigError, match=r"at least one run, got 'c\.json' with none"):
        drawable(empty, "c.json")
    with pytest.raises(ConfigError, match=r"at least one run, got 'p\.json'"):
        drawable(profiles.profile(rows=()), "p.json")


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        ("0.tpot_ms: 0 is", {"tpot_ms": 0.0}),
        ("0.tpot_ms: -3 is", {"tpot_ms": -3.0}),
        ("0.step_ms: 0 is", {"step_ms": (3.0, 0.0)}),
        ("0.ttft_s: 1e\\+300 is", {"ttft_s": 1e300}),
        ("0.context_tokens: 0 is", {"context_tokens": 0}),
        ("0.memory_bytes.host_kv: -1 is", {"memory_bytes": MemoryBytes(host_kv=-1)}),
        ("0.audit.missed_mass.mean: 2 is", {"audit": AuditReport(looks=1, missed_mass=TWO)}),
        ("0.audit.heads.kv_head: 1e\\+15", {"audit": AuditReport(looks=1, heads=(FAR,))}),
    ],
)
def test_numbers_that_no_run_can_have_are_refused(place: str, changes: dict[str, Any]) -> None:
    row = profiles.row("flat", 4096).model_copy(update=changes)
    with pytest.raises(ConfigError, match=rf"'p\.json' is damaged: {place}"):
        drawable(profiles.profile(rows=(row,)), "p.json")


def test_rounding_and_wide_intervals_are_no_damage() -> None:
    estimate = EstimateReport(mean=-1e-9, half_width=3.7)
    error = EstimateReport(mean=2.5)
    found = AuditReport(looks=2, missed_mass=estimate, recall_at_k=estimate, output_error=error)
    row = profiles.row("flat", 37, audit=found, phases_ms=PhasesMs(search=3.0, wait=-1e-9))
    text = Page(render([drawable(profiles.profile(rows=(row,)), "p.json")])).text
    assert "-0" not in text.split("What was missed, against time", 2)[2].split("Settings")[0]


amounts = st.one_of(st.just(0.0), st.floats(1e-9, 1e18))
times = st.floats(1e-9, 1e18)


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(times, amounts, amounts, times), min_size=1, max_size=5))
def test_whatever_is_accepted_can_be_drawn(values: list[tuple[float, ...]]) -> None:
    rows = tuple(
        profiles.row(
            "flat",
            37 * 2**place,
            tpot_ms=tpot,
            step_ms=(tpot, step),
            ttft_s=amount,
            limit_ms=amount,
            phases_ms=PhasesMs(search=other, other=amount),
            audit=profiles.audit(min(1.0, tpot), layers=2),
        )
        for place, (tpot, amount, other, step) in enumerate(values)
    )
    source = drawable(profiles.profile(rows=rows), "a")
    Page(render([source, drawable(profiles.profile(rows=rows[::-1]), "b")]))


def test_a_document_of_another_verb_is_refused() -> None:
    methods = MethodsReport(environment=profiles.environment(), methods=(), indexes=())
    with pytest.raises(ConfigError, match=r"got 'm\.json' of methods, which has nothing to draw"):
        drawable(methods, "m.json")


def lead_of(*rows: Any) -> str:
    found = lead(profiles.profile(rows=rows))
    assert found is not None
    return found.text.replace("\N{NO-BREAK SPACE}", " ")


def missing(method: str, tpot_ms: float, missed: float | None) -> Any:
    audit = None if missed is None else profiles.audit(missed)
    return profiles.row(method, 4096, tpot_ms=tpot_ms, audit=audit)


def test_the_headline_is_of_a_method_that_misses_little() -> None:
    """It crowned Quest, which missed 53% of the mass."""
    full, quest = missing("full", 200.0, None), missing("quest", 20.0, 0.53)
    text = lead_of(full, quest, missing("hybrid", 40.0, 0.03), missing("flat", 50.0, 0.01))
    assert text.startswith(
        "At 4K tokens hybrid was fastest of those that miss at most 5.0% of the softmax mass: "
    )
    assert "the speed of full attention; it missed 3.0%" in text
    assert "Faster: quest, 20.0 ms, missed 53.0%" in text


def test_the_headline_may_be_of_full_attention() -> None:
    text = lead_of(missing("full", 200.0, None), missing("quest", 20.0, 0.53))
    assert "full was fastest of those that miss at most 5.0%" in text
    assert "Faster: quest" in text


def test_what_was_not_audited_is_crowned_by_nobody() -> None:
    text = lead_of(missing("full", 200.0, None), missing("hybrid", 40.0, None))
    assert "full was fastest of those" in text
    assert "Faster: hybrid, 40.0 ms, was not audited" in text
    text = lead_of(missing("hybrid", 40.0, None), missing("flat", 50.0, None))
    assert "hybrid was fastest: 40.0 ms per token; it was not audited." in text


def test_the_cache_stands_beside_the_time_of_its_bytes() -> None:
    """The cache's phases over `cache_limit_ms`; a row without one has a dash."""
    known = profiles.row("hybrid", 4096)
    assert known.cache_ms is not None
    rows = [
        known.model_copy(update={"cache_limit_ms": known.cache_ms / 3.25}),
        profiles.row("flat", 4096, cache_limit_ms=None),
    ]
    table = limit_table("Limits", entries_of(rows))
    column = table.head.index("cache over its limit")
    assert [row[column] for row in table.rows] == ["3.25×", numbers.NOTHING]
    assert "cache over its limit" in page_of(profiles.profile(rows=tuple(rows))).text


def test_the_table_of_phases_is_as_wide_as_its_methods_and_no_wider() -> None:
    """Ten phases across were 25 pixels wider than the page, and clipped."""
    rows = [profiles.row(method, 4096) for method in ("full", "flat", "hybrid")]
    times = {"transfer": 123.4, "wait": 12.3, "select": 34.5}
    rows = [r.model_copy(update={"phases_ms": r.phases_ms.model_copy(update=times)}) for r in rows]
    text = page_of(profiles.profile(rows=tuple(rows))).text
    (found,) = phases_tables("Phases", entries_of(rows))
    assert len(found.rows) == 1 + 10  # sum, phases
    assert len(found.head) == 1 + len(rows)
    assert "123" in text
    many = [profiles.row(f"own_{i}", 4096) for i in range(11)]
    assert [len(one.head) for one in phases_tables("Phases", entries_of(many))] == [9, 4]
