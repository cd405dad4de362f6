"""Many requests to one model: an engine that serves them, what it is asked and what it answers."""

from hybrid_kv.serve.engine import Drained, Engine
from hybrid_kv.serve.requests import (
    EngineStats,
    Finished,
    Happening,
    Limits,
    Prefilled,
    Request,
    RequestReport,
    Sampling,
    Ticket,
    Token,
    Usage,
)

__all__ = [
    "Drained",
    "Engine",
    "EngineStats",
    "Finished",
    "Happening",
    "Limits",
    "Prefilled",
    "Request",
    "RequestReport",
    "Sampling",
    "Ticket",
    "Token",
    "Usage",
]
