"""Figures as files: SVG that any program reads, PNG in the size of a paper."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hybrid_kv.errors import BackendUnavailable, WriteError
from hybrid_kv.report.html.export import export, scenes
from hybrid_kv.report.html.raster import check_raster, to_png
from hybrid_kv.report.html.scene import Box, Dot, Line, Scene, Text
from hybrid_kv.report.html.sources import Source
from hybrid_kv.report.html.svg import MARGIN, to_file
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
    names = [scene.name for scene in scenes([small(), small(), Source(profiles.demo(), "d")])]
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


def test_a_file_of_svg_has_its_own_colours() -> None:
    scene = Scene(
        "n", "t", "d", 100, 50, [Dot(5, 5, "diamond", "s1"), Line(((0, 0), (1, 1)), "s2")]
    )
    text = to_file(scene)
    assert "var(" not in text
    assert ".f-s1{fill:#" in text


def all_marks() -> Scene:
    scene = Scene("n", "Title", "d", 120, 60)
    scene.add(
        Line(((0, 0), (50, 40), (80, 10)), "s1", 2, (3, 2)),
        Box(10, 10, 20, 5, "p_search"),
        *(
            Dot(20 + 12 * i, 30, shape, f"s{i}", hollow=bool(i % 2))
            for i, shape in enumerate(("circle", "square", "diamond", "up", "down", "cross"))
        ),
        Text(60, 50, r"a $b_{1$ \c", "ink", 12, "middle", bold=True),
    )
    return scene


def test_png_has_three_pixels_for_each_of_the_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="PNG needs the extra report")
    path = tmp_path / "figure.png"
    path.write_bytes(to_png(all_marks()))
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    size = struct.unpack(">II", data[16:24])
    assert size == (3 * (120 + 2 * MARGIN), 3 * (60 + 2 * MARGIN))


def test_png_draws_where_svg_does(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image", reason="PNG needs the extra report")
    path = tmp_path / "figure.png"
    path.write_bytes(to_png(Scene("n", "t", "d", 40, 20, [Box(10, 4, 20, 8, "s1")])))
    pixels = image.imread(path)

    def at(x: float, y: float) -> list[int]:
        row, column = round(3 * (y + MARGIN)), round(3 * (x + MARGIN))
        return [round(255 * part) for part in pixels[row, column][:3].tolist()]

    assert at(11, 5) == at(29, 11) == [0x00, 0x62, 0xAD]
    assert at(8, 5) == at(11, 14) == at(32, 11) == at(11, 2) == [255, 255, 255]


def test_png_without_matplotlib_says_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'hybrid-kv\[report\]'"):
        check_raster()


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    with pytest.raises(WriteError, match="cannot be made: File exists"):
        export([small()], taken, "svg")
