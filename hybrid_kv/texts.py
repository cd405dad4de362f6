"""Texts of documents that people have: UTF-8, Markdown with it, and PDF.

A PDF of somebody else's may be made to take all time and memory. A server has it read by a process
of its own, which has little of both; on the command line it is the user's own, and read at once.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from io import BytesIO
from pathlib import Path

from hybrid_kv.errors import ConfigError

PDF_HEAD = b"%PDF-"

PDF_SECONDS = 60.0
"""For a PDF that is read aside."""

PDF_BYTES = 2 * 2**30
"""Address space of the process that does so."""

_REFUSED = 3
"""Its exit code where stderr has the sentence."""


def text_of_pdf(content: bytes, what: str) -> str:
    """The text of all pages, with an empty line between two; "" where they are pictures.

    Args:
        what: is named in errors, such as "file 'book.pdf'".

    Raises:
        ConfigError: it is no PDF, or damaged, or pypdf is missing.
    """
    try:
        from pypdf import PdfReader
    except ImportError:
        raise ConfigError(
            f"{what} is PDF, which pypdf reads: pip install 'hybrid-kv[pdf]', or convert it"
        ) from None
    log = logging.getLogger("pypdf")  # which tells of all that it mends
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        return "\n\n".join(page.extract_text() for page in PdfReader(BytesIO(content)).pages)
    except MemoryError:
        raise
    except Exception as error:  # pypdf has no base of what damaged files make it raise
        raise ConfigError(
            f"{what} must be PDF, got one that is damaged, locked or of another kind; open "
            "it elsewhere, and save it again or convert it to text"
        ) from error
    finally:
        log.setLevel(level)


def text_of_pdf_aside(content: bytes, what: str) -> str:
    """As `text_of_pdf`, by a process that may take `PDF_SECONDS` and `PDF_BYTES`.

    Raises:
        ConfigError: also where it takes more.
    """
    root = str(Path(__file__).parents[1])
    code = (
        f"import sys; sys.path.insert(0, {root!r}); "
        f"from hybrid_kv.texts import main; main({PDF_BYTES})"
    )
    try:
        read = subprocess.run(
            [sys.executable, "-c", code, what],
            input=content,
            capture_output=True,
            timeout=PDF_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{what} must be a PDF that is read within {PDF_SECONDS:g} seconds, got one that takes "
            "longer; convert it to text first"
        ) from None
    if read.returncode == _REFUSED:
        raise ConfigError(read.stderr.decode(errors="replace"))
    if read.returncode:
        raise ConfigError(
            f"{what} must be a PDF that can be read in {PDF_BYTES >> 20:,} MiB, got one that ended "
            "its reader; convert it to text first"
        )
    return read.stdout.decode(errors="replace")


def main(num_bytes: int) -> None:
    """A process that reads a PDF on stdin and writes its text; its argument names the PDF.

    Args:
        num_bytes: of address space that it may take.
    """
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    try:
        text = text_of_pdf(sys.stdin.buffer.read(), sys.argv[1])
    except ConfigError as error:
        sys.stderr.write(str(error))
        sys.exit(_REFUSED)
    sys.stdout.buffer.write(text.encode(errors="replace"))
