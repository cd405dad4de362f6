"""Run documents as one HTML file that needs nothing else: no network, no fonts, no images."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from hybrid_kv.report.html.compare import compare_sections
from hybrid_kv.report.html.elements import Html, el, join
from hybrid_kv.report.html.head import profile_head
from hybrid_kv.report.html.palette import style_rules, variables
from hybrid_kv.report.html.profile_sections import profile_sections
from hybrid_kv.report.html.runs import run_head, run_sections, runs_of
from hybrid_kv.report.html.sources import Drawable, Source, comparisons
from hybrid_kv.report.html.widgets import Section, tab_rules
from hybrid_kv.report.schema import ProfileReport


def render(sources: Sequence[Source]) -> str:
    """The page: profiles after the first are compared with it, then each document is told.

    Raises:
        ConfigError: two profiles have no method at a context in common.
    """
    parts = [*_comparisons(sources, alone=len(sources) == 2)]
    for number, source in enumerate(sources, 1):
        prefix = f"r{number}-"
        parts.append(_document(source, prefix, main=len(sources) == 1))
    title = " · ".join(source.name for source in sources)
    return shell(
        f"{title} – hybrid-kv", join(_masthead(sources), *(part.body for part in parts)), parts
    )


@dataclass(frozen=True, slots=True)
class PagePart:
    """A document's or a comparison's place in the page, under its name in the contents."""

    name: str
    body: Html
    sections: list[Section]


def _comparisons(sources: Sequence[Source], alone: bool) -> Iterable[PagePart]:
    """One part for each comparison; where it is the only one, the page's title is its own."""
    for one in comparisons(sources):
        title = f"{one.names[1]} against {one.names[0]}"
        sections = compare_sections(one, f"c{one.number}-")
        yield article(title, join(None if alone else el("h2", title)), sections)


def _document(source: Source, prefix: str, main: bool) -> PagePart:
    report = source.report
    if isinstance(report, ProfileReport):
        head = profile_head(report, source.name)
        sections = profile_sections(report, source.name, prefix)
    else:
        head, sections = run_head(report, source.name), run_sections(report, prefix)
    kind, title = _title(report)
    if not main:
        head = join(el("h2", el("small", kind), title, el("small", source.name)), head)
    return article(source.name, head, sections)


def article(name: str, top: Html, sections: list[Section]) -> PagePart:
    """A part of sections under a head of its own."""
    body = (el("section", el("h3", one.title), one.body, id=one.ident) for one in sections)
    return PagePart(name, el("article", top, *body), sections)


def _masthead(sources: Sequence[Source]) -> Html:
    kind, title = _title(sources[0].report)
    found = [*comparisons(sources)]
    if len(sources) == 2 and found:
        kind, title = "comparison", " against ".join(reversed(found[0].names))
    elif len(sources) > 1:
        kind, title = "report", " · ".join(source.name for source in sources)
    return el("header", el("p", f"hybrid-kv {kind}", class_="kicker"), el("h1", title))


def _title(report: Drawable) -> tuple[str, str]:
    model = report.model if isinstance(report, ProfileReport) else runs_of(report)[0].model
    return report.command, model


def shell(title: str, body: Html, parts: Sequence[PagePart]) -> str:
    """A whole page around its parts."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        Html('<meta name="color-scheme" content="light dark">'),
        el("title", title),
        Html(f"<style>{_style(body)}</style>"),
    )
    script = Html(f"<script>{_asset('page.js')}</script>")
    page = join(head, el("body", _contents(parts), el("main", body), script))
    return f'<!DOCTYPE html>\n<html lang="en">{page}</html>\n'


def _contents(parts: Sequence[PagePart]) -> Html:
    """Links to the sections, under the names of their documents where there are several."""
    found: list[Html] = []
    for part in parts:
        if len(parts) > 1:
            found.append(el("p", part.name))
        links = (el("li", el("a", one.title, href=f"#{one.ident}")) for one in part.sections)
        found.append(el("ol", *links))
    return el("nav", *found, aria_label="Contents")


def _style(body: Html) -> str:
    panels = max((int(n) for n in re.findall(r'class="panel p(\d+)"', body)), default=0) + 1
    return (
        f":root{{{variables(dark=False)}}}"
        f"@media (prefers-color-scheme: dark){{:root{{{variables(dark=True)}}}}}"
        f"@media print{{:root{{{variables(dark=False)}}}}}"
        f"{style_rules()}{_asset('page.css')}{tab_rules(panels)}"
    )


def _asset(name: str) -> str:
    return (files("hybrid_kv.report.html") / name).read_text(encoding="utf-8")
