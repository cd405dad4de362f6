"""Many requests to one model: what is asked and answered."""

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
