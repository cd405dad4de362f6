"""The driver of single methods, as authors of plug-ins have it."""

from hybrid_kv.testing import ROTARY, Driven, drive, heads

__all__ = ["ROTARY", "Driven", "drive", "heads"]
