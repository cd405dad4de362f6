"""Canvas of figures: a Matplotlib figure in pixels of a page, and its output forms.

Colours are names. On a page each becomes a CSS variable, so that one drawing is light and dark.
Matplotlib is imported when a figure is drawn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape as _escape
from io import BytesIO, StringIO
from typing import Any, Literal

Shape = Literal["circle", "square", "diamond", "up", "down", "cross"]
Paint = Callable[[str], str]
"""From a colour's name to what Matplotlib draws with."""

COLOURS: dict[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#14171b"),
    "panel": ("#f5f6f7", "#1d2126"),
    "ink": ("#16191d", "#eceef0"),
    "soft": ("#555c66", "#a9b1bb"),
    "rule": ("#d5d9de", "#3a4149"),
    "grid": ("#e8eaed", "#282d33"),
    "accent": ("#0a5fa8", "#6cb6ff"),
    "good": ("#0067b3", "#63b3ff"),
    "bad": ("#b64a00", "#ff9a57"),
    "loud": ("#8a4b00", "#ffc46b"),
    "loudpaper": ("#fff4de", "#33270f"),
    "s0": ("#3d434b", "#c9ced4"),
    "s1": ("#0062ad", "#5db0ff"),
    "s2": ("#c44e00", "#ff9552"),
    "s3": ("#00795a", "#45cfa4"),
    "s4": ("#9a4487", "#e79fd6"),
    "s5": ("#8f6a00", "#e3bb45"),
    "s6": ("#2489b8", "#97dbff"),
    "s7": ("#7b6a5a", "#bfae9c"),
    "p_search": ("#b64a00", "#e87b32"),
    "p_cold_attention": ("#eda63c", "#ffcb7d"),
    "p_select": ("#00417f", "#2f7ec7"),
    "p_resident_attention": ("#4d9bdc", "#8cc5f7"),
    "p_merge": ("#00795a", "#2fb389"),
    "p_transfer": ("#5fc3a4", "#9be6cf"),
    "p_wait": ("#9a4487", "#d286c0"),
    "p_model": ("#6c747e", "#7d8690"),
    "p_python": ("#a7aeb7", "#aeb6bf"),
    "p_other": ("#d3d7dc", "#535b64"),
    "h0": ("#f0f4f8", "#20272e"),
    "h1": ("#d8e6f2", "#1f3a52"),
    "h2": ("#b5d2ea", "#225178"),
    "h3": ("#86b8dd", "#285f8f"),
    "h4": ("#5598ca", "#306ea5"),
    "h5": ("#2f77b0", "#66a9de"),
    "h6": ("#195790", "#94c8f0"),
    "h7": ("#0c3a68", "#c3e2fa"),
    "h8": ("#061f3c", "#f3faff"),
    "lo": ("#16191d", "#eceef0"),
    "hi": ("#ffffff", "#0d1013"),
}
"""Each name's colour on a light and on a dark page; hues after Okabe and Ito, for colour-blind
readers."""

_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "up": "^", "down": "v", "cross": "x"}


@dataclass(slots=True)
class Picture:
    """A figure to be drawn: a name for its file, a title, and its contents in words.

    width, height: in pixels of a page. draw: fills a canvas of that size.
    """

    name: str
    title: str
    description: str
    width: float
    height: float
    draw: Callable[[Canvas], None]


class Canvas:
    """A Matplotlib figure, a unit of which is a pixel, and the tips of its marks."""

    def __init__(self, width: float, height: float, paint: Paint) -> None:
        from matplotlib.figure import Figure

        self.width, self.height, self.paint = width, height, paint
        self.figure: Any = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
        self.figure.patch.set_visible(False)
        self.tips: list[str] = []

    def axes(self, left: float, top: float, right: float, bottom: float) -> Any:
        """Axes whose edges stand that far from the figure's, with a thin grid and no frame."""
        wide = max(1.0, self.width - left - right)
        high = self.height - top - bottom
        box = (left / self.width, bottom / self.height, wide / self.width, high / self.height)
        axes = self.figure.add_axes(box)
        axes.patch.set_visible(False)
        axes.set_axisbelow(True)
        for name, spine in axes.spines.items():
            spine.set_visible(name == "bottom")
            spine.set_color(self.paint("rule"))
        soft = self.paint("soft")
        axes.tick_params(which="both", length=0, labelsize=SMALL, labelcolor=soft, pad=6)
        axes.grid(True, color=self.paint("grid"), linewidth=1)
        return axes

    def tipped(self, artist: Any, tip: str) -> None:
        """Gives a mark what the pointer shows."""
        if tip:
            artist.set_gid(f"tip{len(self.tips)}")
            self.tips.append(tip)

    def mark(
        self, axes: Any, at: tuple[float, float], look: Marker, tip: str = "", size: float = 7
    ) -> None:
        """A marker at a place of the axes."""
        (line,) = axes.plot([at[0]], [at[1]], **self._style(look, size), clip_on=False, zorder=4)
        self.tipped(line, tip)

    def _style(self, look: Marker, size: float) -> dict[str, Any]:
        colour = self.paint(look.colour)
        return {
            "marker": _MARKERS[look.shape],
            "markersize": size,
            "markerfacecolor": self.paint("paper") if look.hollow else colour,
            "markeredgecolor": colour,
            "markeredgewidth": 1.6,
            "linestyle": "none",
        }

    def text(self, x: float, y: float, text: str, colour: str = "soft", **more: Any) -> None:
        """Text on a baseline, in pixels from the figure's lower left corner."""
        place = (x / self.width, y / self.height)
        style: dict[str, Any] = {"color": self.paint(colour), "fontsize": SMALL, **more}
        self.figure.text(*place, clean(text), **style)

    def legend(self, entries: Sequence[Named]) -> None:
        """Names at the top, in as many columns as fit."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        handles: list[Any] = []
        for one in entries:
            colour = self.paint(one.colour)
            if one.shape is None:
                handles.append(Patch(color=colour))
                continue
            style = self._style(Marker(one.shape, one.colour, one.hollow), 7)
            if one.dash is not None:
                style["linestyle"] = _dashes(one.dash)
            handles.append(Line2D([], [], color=colour, linewidth=1.8, **style))
        self.figure.legend(
            handles,
            [clean(one.name) for one in entries],
            loc="upper left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=_columns(entries, self.width),
            frameon=False,
            fontsize=SMALL,
            labelcolor=self.paint("soft"),
            borderpad=0.2,
            borderaxespad=0.0,
            handlelength=2.2,
            handletextpad=0.5,
            columnspacing=1.2,
            labelspacing=0.35,
        )


@dataclass(frozen=True, slots=True)
class Marker:
    """A shape and a colour; hollow: what was measured was cut short, or is not sure."""

    shape: Shape
    colour: str
    hollow: bool = False


@dataclass(frozen=True, slots=True)
class Named:
    """A line of a legend: a patch of colour, or a marker with its line where it has one."""

    name: str
    colour: str
    shape: Shape | None = None
    hollow: bool = False
    dash: tuple[float, ...] | None = None


SMALL = 11.0
"""Size of text, in pixels."""
_DPI = 72.0
_HANDLE, _LINE = 40.0, 14.5
"""Pixels of a legend's handle with its margins, and of a line of it."""


def text_width(text: str) -> float:
    """Roughly how many pixels a text takes, on the long side."""
    return 0.6 * SMALL * len(text)


def _columns(entries: Sequence[Named], width: float) -> int:
    wide = max((text_width(one.name) for one in entries), default=0.0) + _HANDLE
    return max(1, min(len(entries), int(width // wide)))


def legend_height(entries: Sequence[Named], width: float) -> float:
    """Pixels that the legend of a figure takes."""
    return _LINE * -(-len(entries) // _columns(entries, width)) + 6 if entries else 0.0


def _dashes(dash: tuple[float, ...] | None) -> Any:
    return (0, dash) if dash else "-"


def line(canvas: Canvas, axes: Any, points: Sequence[tuple[float, float]], look: Any) -> None:
    """A line through points of the axes; look: its colour's name, width and dashes."""
    colour, width, dash = look
    xs, ys = zip(*points, strict=True)
    style = {"color": canvas.paint(colour), "linewidth": width, "linestyle": _dashes(dash)}
    axes.plot(xs, ys, **style, clip_on=False, zorder=3)


_PLACES = {f"#c0fe{i:02x}": name for i, name in enumerate(COLOURS)}
_HOLDERS = {name: place for place, name in _PLACES.items()}
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": SMALL,
    "svg.fonttype": "none",
    "svg.hashsalt": "hybrid-kv",
    "text.parse_math": False,
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def drawn(picture: Picture, paint: Paint) -> Canvas:
    """The picture as a Matplotlib figure."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        canvas = Canvas(picture.width, picture.height, paint)
        picture.draw(canvas)
    return canvas


def to_inline(picture: Picture, ident: str) -> str:
    """An <svg> for a page whose style sheet has the colours; `ident` is unique in the page."""
    body = re.sub(
        "|".join(_PLACES), lambda found: f"var(--{_PLACES[found[0]]})", _body(picture, ident)
    )
    return (
        f'<svg viewBox="0 0 {_n(picture.width)} {_n(picture.height)}" role="img" '
        f'width="{_n(picture.width)}" height="{_n(picture.height)}" '
        f'aria-labelledby="{ident}-t {ident}-d"><title id="{ident}-t">{escape(picture.title)}'
        f'</title><desc id="{ident}-d">{escape(picture.description)}</desc>{body}</svg>'
    )


def to_file(picture: Picture) -> str:
    """A document in light colours, for papers."""
    wide, high = _n(picture.width + 2 * MARGIN), _n(picture.height + 2 * MARGIN)
    body = re.sub(
        "|".join(_PLACES), lambda found: COLOURS[_PLACES[found[0]]][0], _body(picture, "f")
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        f'viewBox="{_n(-MARGIN)} {_n(-MARGIN)} {wide} {high}">'
        f"<title>{escape(picture.title)}</title><desc>{escape(picture.description)}</desc>"
        f"<style>text{{font-family:{FONT}}}{SVG_STYLE}</style>"
        f'<rect x="{_n(-MARGIN)}" y="{_n(-MARGIN)}" width="{wide}" height="{high}" fill="#ffffff"/>'
        f"{body}</svg>\n"
    )


def to_png(picture: Picture, scale: float = 3.0) -> bytes:
    """The picture in light colours, `scale` pixels of the image to one of the page."""
    canvas = drawn(picture, lambda name: COLOURS[name][0])
    canvas.figure.patch.set_visible(True)
    image = BytesIO()
    title = {"Title": clean(picture.title)}
    canvas.figure.savefig(image, format="png", dpi=scale * _DPI, facecolor="white", metadata=title)
    return image.getvalue()


MARGIN = 12.0
"""Empty pixels around a figure in an SVG file of its own."""
SVG_STYLE = "svg path,svg use{stroke-linejoin:round;stroke-linecap:butt}"


def _body(picture: Picture, ident: str) -> str:
    """Body of Matplotlib's drawing, with placeholders for colours and identifiers of its own."""
    import matplotlib

    canvas, out = drawn(picture, _HOLDERS.__getitem__), StringIO()
    with matplotlib.rc_context(_STYLE):
        canvas.figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index('<g id="figure_1">') : text.rindex("</svg>")]
    text = re.sub(r"<defs>\s*<clipPath.*?</clipPath>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r' (?:clip-path="url[^"]*"|transform="rotate\(-0 [^"]*")', "", text)
    text = re.sub(r"font-family: [^;\"]*;? ?|'DejaVu Sans'[^;\"]*sans-serif", "", text)
    text = re.sub(r'(?<= d=")[^"]*|(?<= [xy]=")[^"]*', _rounded, text)
    text = re.sub(r' id="(?!m[0-9a-f]{10}"|tip\d)[^"]*"', "", text)
    text = re.sub(r'(?:xlink:)?(id="|href="#)(m[0-9a-f]{10})', rf"\1{ident}-\2", text)
    tips = canvas.tips
    text = re.sub(
        r'<g id="tip(\d+)">', lambda found: f"<g><title>{escape(tips[int(found[1])])}</title>", text
    )
    return re.sub(r">\s+<", "><", text).strip()


def _rounded(found: re.Match[str]) -> str:
    numbers_ = re.sub(r"(\.\d)\d+", r"\1", found[0])
    return " ".join(numbers_.split())


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


_NO_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


def clean(text: str) -> str:
    """Text without control characters, which XML has no place for, escaped or not."""
    return _NO_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def escape(text: str) -> str:
    """Text for XML."""
    return _escape(clean(text))
