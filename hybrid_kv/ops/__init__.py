"""Arithmetic back ends behind one dispatch function; `reference` defines the meaning of each op."""

from hybrid_kv.ops.dispatch import BACKENDS, Ops, choose_backend, get_ops

__all__ = ["BACKENDS", "Ops", "choose_backend", "get_ops"]
