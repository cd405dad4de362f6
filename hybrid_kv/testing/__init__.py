"""Checks of methods and indexes for the authors of plug-ins, without a model.

check_method("heaviest", budget=64)    # nothing is lost at a full budget, budgets are kept
check_index("strided")                 # true scores, best first, later keys are found
drive(method, prompt=173, new=40)      # a prompt and an answer of one layer, step by step
"""

from hybrid_kv.testing.driving import (
    ROTARY,
    Driven,
    check_index,
    check_method,
    drive,
    heads,
    softmax_attention,
)

__all__ = [
    "ROTARY",
    "Driven",
    "check_index",
    "check_method",
    "drive",
    "heads",
    "softmax_attention",
]
