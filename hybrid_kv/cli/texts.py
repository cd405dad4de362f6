"""Text of the files that a context is built from: plain text, Markdown, PDF."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from hybrid_kv.errors import ConfigError


def read_texts(files: Sequence[str]) -> str:
    """The text of all files, in order, with an empty line between two.

    Raises:
        ConfigError: a file cannot be read, or there is no text in any of them.
    """
    texts = [_read(file) for file in files]
    if not any(text.strip() for text in texts):
        raise ConfigError(
            f"a context needs text, got none in {', '.join(files)}; scanned pages have none"
        )
    return "\n\n".join(texts)


def _read(file: str) -> str:
    if file == "-":
        return sys.stdin.read()
    path = Path(file)
    try:
        if path.suffix.lower() == ".pdf":
            return _read_pdf(path)
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"file '{path}' must be UTF-8 text or PDF; convert it") from None
    except OSError as error:
        raise ConfigError(
            f"file '{path}' cannot be read: {error.strerror}; check the path"
        ) from None


def _read_pdf(path: Path) -> str:
    try:
        from pypdf import PdfReader
    except ImportError:
        raise ConfigError(
            f"file '{path}' is PDF, which pypdf reads: pip install 'hybrid-kv[pdf]', or convert it"
        ) from None
    log = logging.getLogger("pypdf")  # which tells of all that it mends
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with path.open("rb") as file:
            return "\n\n".join(page.extract_text() for page in PdfReader(file).pages)
    except OSError:
        raise
    except Exception as error:  # pypdf has no base of what damaged files make it raise
        raise ConfigError(
            f"file '{path}' must be PDF, got one that is damaged, locked or of another kind; open "
            "it elsewhere, and save it again or convert it to text"
        ) from error
    finally:
        log.setLevel(level)
