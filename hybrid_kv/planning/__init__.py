"""Before anything runs: what a model and a machine are, what fits, and how long it will take."""

from hybrid_kv.planning.plan import Machine, ModelFacts, Option, Plan
from hybrid_kv.planning.planner import make_plan
from hybrid_kv.planning.rates import CARDS, Rates, measure_rates, rates_of_card

__all__ = [
    "CARDS",
    "Machine",
    "ModelFacts",
    "Option",
    "Plan",
    "Rates",
    "make_plan",
    "measure_rates",
    "rates_of_card",
]
