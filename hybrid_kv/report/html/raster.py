"""A scene as PNG, drawn by Matplotlib, which brings its fonts along."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from hybrid_kv.errors import BackendUnavailable
from hybrid_kv.report.html.palette import COLOURS
from hybrid_kv.report.html.scene import Box, Dot, Line, Mark, Scene, Text, marker_points
from hybrid_kv.report.html.svg import MARGIN

_DPI = 96.0  # of CSS pixels
_FONT_RATIO = 0.88  # DejaVu Sans is wider than the fonts that scenes are laid out for
_POINTS = 72 / _DPI


def check_raster() -> None:
    """Raises BackendUnavailable where Matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BackendUnavailable(
            "--png needs matplotlib, which is not installed; pip install 'hybrid-kv[report]', or "
            "take --svg, which needs nothing"
        ) from None


def to_png(scene: Scene, scale: float = 3.0) -> bytes:
    """The scene in light colours, `scale` pixels of the image to one of the scene.

    Raises:
        BackendUnavailable: Matplotlib is not installed.
    """
    check_raster()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wide, high = scene.width + 2 * MARGIN, scene.height + 2 * MARGIN
    figure = Figure(figsize=(wide / _DPI, high / _DPI), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(-MARGIN, wide - MARGIN), ylim=(high - MARGIN, -MARGIN))
    axes.axis("off")
    for order, mark in enumerate(scene.marks):
        _draw(axes, mark, order + 1)
    image = BytesIO()
    figure.savefig(image, format="png", dpi=scale * _DPI, metadata={"Title": scene.title})
    return image.getvalue()


def _draw(axes: Any, mark: Mark, order: int) -> None:
    from matplotlib.patches import Rectangle

    colour = COLOURS[mark.colour][0]
    match mark:
        case Line():
            xs, ys = zip(*mark.points, strict=True)
            style: Any = (0, tuple(part / mark.width for part in mark.dash)) if mark.dash else "-"
            width = _POINTS * mark.width
            axes.plot(xs, ys, color=colour, linewidth=width, linestyle=style, zorder=order)
        case Box():
            corner = (mark.x, mark.y)
            box = Rectangle(corner, mark.width, mark.height, facecolor=colour, linewidth=0)
            box.set_zorder(order)
            axes.add_patch(box)
        case Dot():
            _marker(axes, mark, colour, order)
        case Text():
            axes.text(
                mark.x,
                mark.y,
                mark.text,
                color=colour,
                fontsize=_POINTS * _FONT_RATIO * mark.size,
                fontweight="bold" if mark.bold else "normal",
                ha={"start": "left", "middle": "center", "end": "right"}[mark.anchor],
                va="baseline",
                zorder=order,
                parse_math=False,
            )


def _marker(axes: Any, dot: Dot, colour: str, order: int) -> None:
    from matplotlib.patches import Circle, Polygon

    face = "white" if dot.hollow else colour
    if dot.shape == "cross":
        a, b, c, d = marker_points(dot)
        for (x0, y0), (x1, y1) in ((a, b), (c, d)):
            axes.plot((x0, x1), (y0, y1), color=colour, linewidth=2 * _POINTS, zorder=order)
        return
    patch: Any
    if dot.shape == "circle":
        patch = Circle((dot.x, dot.y), dot.size / 2)
    else:
        patch = Polygon(marker_points(dot), closed=True, joinstyle="round")
    patch.set(facecolor=face, edgecolor=colour, linewidth=1.6 * _POINTS, zorder=order)
    axes.add_patch(patch)
