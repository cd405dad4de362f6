"""A PDF that is none, or is damaged: our sentence, and none of pypdf's words."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hybrid_kv.cli.files import read_texts
from hybrid_kv.errors import ConfigError

pytest.importorskip("pypdf", reason="pypdf is not installed (extra pdf)")


@pytest.mark.parametrize("data", [b"", b"hello", b"%PDF-1.4\n", b"%PDF-1.4\nstartxref\n7\n%%EOF"])
def test_a_broken_pdf_is_one_sentence_of_ours(
    data: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "book.pdf"
    file.write_bytes(data)
    with pytest.raises(ConfigError) as refused:
        read_texts([str(file)])
    assert str(refused.value) == (
        f"file '{file}' must be PDF, got one that is damaged, locked or of another kind; open it "
        "elsewhere, and save it again or convert it to text"
    )
    assert not caplog.records
    assert logging.getLogger("pypdf").isEnabledFor(logging.WARNING), "as it was before"
