"""Tests on an emulated device; all are skipped, with the reason, where none can be emulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.guard import why_not


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := why_not():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))
