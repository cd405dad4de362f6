"""What is seen of a running cache: where its time goes, and what its approximation misses."""

from hybrid_kv.watch.audit import Audit, Finding, Look, Target
from hybrid_kv.watch.auditor import Auditor
from hybrid_kv.watch.phases import Phases

__all__ = ["Audit", "Auditor", "Finding", "Look", "Phases", "Target"]
