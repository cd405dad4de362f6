"""Figures as files: SVG that any program reads, PNG in the size of a paper."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hybrid_kv.errors import WriteError
from hybrid_kv.report.html.canvas import Canvas, Picture, to_file, to_png
from hybrid_kv.report.html.page import export, pictures
from hybrid_kv.report.html.sources import Source
from tests.report import profiles

SVG = "{http://www.w3.org/2000/svg}"


def small() -> Source:
    return Source(profiles.profile((4096, 32768)), "a.json")


def test_every_figure_becomes_a_file(tmp_path: Path) -> None:
    written = export([small()], tmp_path / "figures", "svg")
    names = {path.stem for path in written}
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {p.name for p in written}
    assert len(names) == len(written)
    kinds = ("phases", "memory", "attended", "recall", "limit")
    assert {"tpot", "ttft", *(f"{kind}-32K" for kind in kinds)} <= names
    assert "heads-hybrid-32K" in names
    for path in written:
        root = ElementTree.parse(path).getroot()
        assert root.tag == f"{SVG}svg"
        assert root.findtext(f"{SVG}title")
        assert root.findtext(f"{SVG}desc")


def test_files_of_several_runs_do_not_overwrite_each_other() -> None:
    names = [one.name for one in pictures([small(), small(), Source(profiles.demo(), "d")])]
    assert len(set(names)) == len(names)
    assert {"run1-tpot", "run2-tpot", "profile2-over-profile1-ratio-32K"} <= set(names)
    assert any(name.startswith("run3-phases") for name in names)


def test_a_method_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    row = profiles.row("../../x/<y>\x07", 4096, audit=profiles.audit(0.03, layers=2))
    folder = tmp_path / "a" / "b"
    folder.parent.mkdir()
    written = export([Source(profiles.profile(rows=(row,)), "a.json")], folder, "svg")
    assert all(path.parent == folder and path.exists() for path in written)
    for path in written:
        ElementTree.parse(path)  # a control character would not be XML
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def box(canvas: Canvas) -> None:
    from matplotlib.patches import Rectangle

    axes = canvas.axes(0, 0, 0, 0)
    axes.set(xlim=(0, 40), ylim=(20, 0))
    axes.axis("off")
    axes.add_patch(Rectangle((10, 4), 20, 8, linewidth=0, facecolor=canvas.paint("s1")))


BOX = Picture("n", "Title", "d", 40, 20, box)


def test_a_file_of_svg_has_its_own_colours() -> None:
    text = to_file(BOX)
    assert "var(" not in text
    assert "fill: #0062ad" in text
    assert "#c0fe" not in text


def test_png_has_three_pixels_for_each_of_the_figure() -> None:
    data = to_png(BOX)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (3 * 40, 3 * 20)


def test_png_draws_where_svg_does(tmp_path: Path) -> None:
    from matplotlib import image

    path = tmp_path / "figure.png"
    path.write_bytes(to_png(BOX))
    pixels = image.imread(path)

    def at(x: float, y: float) -> list[int]:
        return [round(255 * part) for part in pixels[round(3 * y), round(3 * x)].tolist()]

    assert at(11, 5) == at(29, 11) == [0x00, 0x62, 0xAD, 255]
    assert at(8, 5) == at(11, 14) == at(32, 11) == at(11, 2) == [255, 255, 255, 255]


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    with pytest.raises(WriteError, match="cannot be made: File exists"):
        export([small()], taken, "svg")


def test_nothing_that_draws_is_loaded_before_something_is_drawn() -> None:
    """Matplotlib takes a second or two, which `import hybrid_kv` and the command must not."""
    code = (
        "import sys, hybrid_kv, hybrid_kv.cli.main, hybrid_kv.report.html.evaluation_page\n"
        "assert 'matplotlib' not in sys.modules, 'matplotlib'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
