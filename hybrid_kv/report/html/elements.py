"""HTML that is escaped by construction: text becomes markup only through `el`."""

from __future__ import annotations

from html import escape


class Html(str):
    """Markup that is safe to put into a page."""

    __slots__ = ()


Child = str | None
"""What stands inside an element: markup as it is, other text escaped, None left out."""

_VOID = {"br", "col", "input", "meta"}


def el(name: str, /, *children: Child, **attributes: str | int | float | None) -> Html:
    """An element; None attributes are left out.

    A trailing underscore of an attribute's name is dropped (`class_`), inner ones become hyphens.
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            attribute = key.rstrip("_").replace("_", "-")
            words.append(f'{attribute}="{escape(str(value))}"')
    start = f"<{' '.join(words)}>"
    return Html(start) if name in _VOID else Html(f"{start}{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """Children in a row."""
    return Html("".join(_markup(child) for child in children if child is not None))


def _markup(child: str) -> str:
    return child if isinstance(child, Html) else escape(child)
