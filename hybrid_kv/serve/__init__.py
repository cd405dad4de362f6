"""Many requests to one model: an engine that serves them, what it is asked and what it answers."""

from hybrid_kv.serve.engine import Engine, ShutdownResult
from hybrid_kv.serve.requests import (
    EngineStats,
    Finished,
    Happening,
    Limits,
    Prefilled,
    Request,
    RequestHandle,
    RequestReport,
    Sampling,
    Token,
    Usage,
)

__all__ = [
    "Engine",
    "EngineStats",
    "Finished",
    "Happening",
    "Limits",
    "Prefilled",
    "Request",
    "RequestHandle",
    "RequestReport",
    "Sampling",
    "ShutdownResult",
    "Token",
    "Usage",
]
