"""Arithmetic back ends behind one dispatch function; `reference` defines the meaning of each op."""

from hybrid_kv.ops.dispatch import Ops, get_ops
from hybrid_kv.ops.operations import BACKENDS, choose_backend, device_of

__all__ = ["BACKENDS", "Ops", "choose_backend", "device_of", "get_ops"]
