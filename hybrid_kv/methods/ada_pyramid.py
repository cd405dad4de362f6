"""Ada-Pyramid: PyramidKV whose heads share the budget of their layer."""

from __future__ import annotations

from hybrid_kv.config import Count, Tokens
from hybrid_kv.methods.ada_snapkv import Safeguarded, Shared
from hybrid_kv.methods.pyramidkv import PyramidKV, PyramidParams
from hybrid_kv.plugins import METHODS


@METHODS.register("ada_pyramid", paper="Feng et al. 2024, arXiv:2407.11550, section 3.4")
class AdaPyramid(Shared, PyramidKV):
    """PyramidKV where a layer's heads share its budget by the scores; DROPS the rest.

    The pyramid says what a layer keeps, as in pyramidkv; its heads share that, as in ada_snapkv.

    Deviations: those of pyramidkv and ada_snapkv.
    """

    class Params(Safeguarded, PyramidParams):
        """As pyramidkv, with safeguard; window_tokens, observed_tokens: as of ada_snapkv."""

        window_tokens: Tokens = 32
        observed_tokens: Count = 32
