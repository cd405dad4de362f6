"""A small language with records hidden in filler text, and the tasks of the shipped model.

`make_sample` builds a haystack of any length with questions, `is_correct` judges an answer,
`filler` gives plain text. The tokenizer lives in `scripts.needle.tokenizer`, so that
this package needs numpy only.
"""

from hybrid_kv.eval.needle.facts import Question
from hybrid_kv.eval.needle.samples import TASKS, NeedleTask, Sample, filler, is_correct, make_sample

__all__ = ["TASKS", "NeedleTask", "Question", "Sample", "filler", "is_correct", "make_sample"]
