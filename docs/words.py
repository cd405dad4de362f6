"""How many words the documents have, and how many they may: `python docs/words.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = {
    "README.md": 900,
    "docs/ARCHITECTURE.md": 2_000,
    "docs/decisions.md": 8_000,
    "docs/lab.md": 8_000,
}
ALL = 40_000
"""Of all documents together: README and its neighbours, docs without the archive, benchmarks."""


def documents() -> Iterator[Path]:
    """Every page that is kept up to date; the archive is not, and generated pages are no text."""
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "benchmarks").glob("*.md"))
    yield from sorted((ROOT / "benchmarks").glob("*/README.md"))
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if path.relative_to(ROOT / "docs").parts[0] not in ("archive", "reference"):
            yield path


def words() -> dict[str, int]:
    """Words by document, tables and code included."""
    return {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").split())
        for path in documents()
    }


def excess(counts: dict[str, int]) -> list[str]:
    """What is longer than it may be, in a sentence each."""
    over = [
        f"{name}: expected at most {most} words, got {counts[name]}; move some to another page"
        for name, most in LIMITS.items()
        if counts[name] > most
    ]
    if sum(counts.values()) > ALL:
        over.append(
            f"all documents: expected at most {ALL} words, got {sum(counts.values())}; "
            "move old ones to docs/archive"
        )
    return over


def main() -> None:
    """Print the counts; exit code 1, with a sentence for each, where something is too long."""
    counts = words()
    for name, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{count:6}  {name}")
    print(f"{sum(counts.values()):6}  together, of {ALL}")
    if over := excess(counts):
        sys.exit("\n".join(over))


if __name__ == "__main__":
    main()
