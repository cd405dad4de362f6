"""Before anything runs: what a model and a machine are, what fits, and how long it will take."""

from hybrid_kv.planning.planner import Machine, ModelFacts, Option, Plan, make_plan
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
