"""Tasks that methods are compared on, one family a file; importing this package registers them."""

from hybrid_kv.eval.tasks.base import (
    TASKS,
    Language,
    Room,
    Task,
    TaskConfig,
    TextQuestion,
    TextSample,
)
from hybrid_kv.eval.tasks.data_sets import InfiniteBench, LongBench, Recorded, RulerFiles
from hybrid_kv.eval.tasks.documents import MultiHopQA, Perplexity, SingleHopQA
from hybrid_kv.eval.tasks.ruler import (
    CommonWords,
    FrequentWords,
    KeyValue,
    MostFrequent,
    MultiKey1,
    MultiKey2,
    MultiKey3,
    MultiQuery,
    MultiValue,
    Passkey,
    Single1,
    Single2,
    Single3,
    VariableTracking,
)

RULER = (
    *("single_1", "single_2", "single_3", "multi_key_1", "multi_key_2", "multi_key_3"),
    *("multi_value", "multi_query", "variable_tracking", "common_words", "frequent_words"),
    *("qa_1", "qa_2"),
)
"""The thirteen tasks of RULER (arXiv:2404.06654)."""

__all__ = [
    "RULER",
    "TASKS",
    "CommonWords",
    "FrequentWords",
    "InfiniteBench",
    "KeyValue",
    "Language",
    "LongBench",
    "MostFrequent",
    "MultiHopQA",
    "MultiKey1",
    "MultiKey2",
    "MultiKey3",
    "MultiQuery",
    "MultiValue",
    "Passkey",
    "Perplexity",
    "Recorded",
    "Room",
    "RulerFiles",
    "Single1",
    "Single2",
    "Single3",
    "SingleHopQA",
    "Task",
    "TaskConfig",
    "TextQuestion",
    "TextSample",
    "VariableTracking",
]
