"""The table of operations: the definition of each, and its back ends with their needs.

Functions are named, so that no kernel is imported before it is called. All functions of a row take
the arguments of its definition.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from torch import Tensor

from hybrid_kv.ops import native, reference_pages, tail, torch_cpu
from hybrid_kv.ops.devices import DEVICE_BACKENDS
from hybrid_kv.types import Candidates, PartialAttention

Result_co = TypeVar("Result_co", covariant=True)
Need = Literal[
    "here",
    "asked",
    "cpu",
    "cuda",
    "compiled",
    "floats",
    "halves",
    "plain",
    "pairs",
    "few",
    "suited",
]
"""A condition of a call; `choice.choose_backend` says when each is met."""


class By(NamedTuple):
    """A back end of an operation, as a function of a module.

    module: its full name where it is imported on use. name: of the function; empty where it has
    that of the operation. needs: all of them must be met. uses: the attribute of `Ops` that the
    function takes as a keyword, beside the arguments.
    """

    backend: str
    module: ModuleType | str
    name: str = ""
    needs: tuple[Need, ...] = ()
    uses: str | None = None

    @property
    def function(self) -> Callable[..., Any]:
        """The function as it is now: tests and benchmarks put others in its place."""
        module = import_module(self.module) if isinstance(self.module, str) else self.module
        found: Callable[..., Any] = getattr(module, self.name)
        return found


class Operation(Generic[Result_co]):
    """A row of the table.

    name: as `Ops.served` has it. by: back ends by name, the first choice of "auto" first, and last
    the definition, "reference"; in a row without one other operations do the work.
    """

    def __init__(self, name: str, *by: By) -> None:
        self.name = name
        self.by = {one.backend: one._replace(name=one.name or name) for one in by}
        self.has_kernels = not self.by.keys().isdisjoint(DEVICE_BACKENDS)


_ATTENTION = "hybrid_kv.ops.reference"  # which the engine's own steps never call


def _defined(name: str = "", module: ModuleType | str = _ATTENTION, uses: str | None = None) -> By:
    return By("reference", module, name, uses=uses)


def _of_pages(name: str = "", uses: str | None = None) -> By:
    return _defined(name, reference_pages, uses)


def _selected(name: str) -> By:
    return _defined(name, "hybrid_kv.ops.sketch_select")


def _native(*needs: Need, name: str = "", module: ModuleType | str = native) -> By:
    return By("native", module, name, ("here", "cpu", *needs), "pool")


def _triton(module: str, name: str = "", *needs: Need, uses: str | None = None) -> By:
    module = f"hybrid_kv.ops.triton.{module}"
    return By("triton", module, name, ("here", "compiled", "floats", *needs), uses)


_PROMPT = _native("suited", module="hybrid_kv.ops.native.prompt")
_FUSED = (
    By("torch_cpu", torch_cpu, needs=("cpu", "floats", "plain", "pairs")),
    By("torch_cuda", "hybrid_kv.ops.torch_cuda", needs=("cuda", "floats", "plain", "pairs")),
)
# It compiles for minutes at its first use, so it serves those who ask for it.
_FLASHINFER = By(
    "flashinfer", "hybrid_kv.ops.flashinfer", needs=("here", "asked", "halves", "plain")
)
_Attention = Operation[PartialAttention]

ATTEND = _Attention("attend", _native("suited"), *_FUSED, _defined())
ATTEND_VISIBLE = _Attention("attend_visible", _native("few"), _defined(uses="attend"))
ATTEND_CAUSAL = _Attention("attend_causal", _PROMPT, *_FUSED, _defined())
ATTEND_WITH_MASSES = Operation[tuple[PartialAttention, Tensor]]("attend_with_masses", _PROMPT)
_SPARSE = "hybrid_kv.ops.block_sparse"
_TILES = _native(module="hybrid_kv.ops.native.block_sparse")
ATTEND_BLOCKS = _Attention(
    "attend_blocks",
    _native("suited", module="hybrid_kv.ops.native.block_sparse"),
    _triton("blocks", "", "suited"),
    _defined(module=_SPARSE),
)
ATTEND_AT = _Attention("attend_at", _TILES, _defined(module=_SPARSE))
BLOCK_MASSES = Operation[Tensor]("block_masses", _TILES, _defined(module=_SPARSE))
ATTEND_RETRIEVED = _Attention("attend_retrieved", _native(), _defined(uses="attend"))
ATTEND_RAGGED = _Attention(
    "attend_ragged", _native("few"), _triton("ragged", uses="uploads"), _defined(uses="attend")
)
ATTEND_PAGES = _Attention("attend_pages", _triton("paged"), _FLASHINFER, _defined(uses="attend"))
MERGE = _Attention("merge", _native(), _triton("merge"), _defined())
PLAN_STEP = Operation[None]("plan_step", _native(name="LayerPlan"))

PAGE_SCORES = Operation[Tensor]("page_scores", _native(), _triton("scores"), _of_pages())
CHOOSE_PAGES = Operation[Tensor]("choose_pages", _triton("scores"), _of_pages(uses="page_scores"))
CHOOSE_LISTED = Operation[Tensor](
    "choose_listed", _triton("scores", "listed_page_scores"), _of_pages("listed_page_scores")
)
APPEND = Operation[None]("append", _triton("digests", "append_token", "few"))
APPEND_AT = Operation[None]("append_at", _triton("digests"), _of_pages())
UPDATE_DIGESTS = Operation[None]("update_digests", _triton("digests"), _of_pages())
COPY_PAGES = Operation[None]("copy_pages", _triton("digests"), _of_pages())
PAGE_WRITER = Operation[None]("page_writer", _native(name="PageWriter"))

NEAREST_KEYS = Operation[Tensor]("nearest_keys", _triton("nearest"), _defined())
ENCODE_SKETCH = Operation[None](
    "encode_sketch", _triton("sketch_encode", "encode"), _selected("encode")
)
FIND_BY_SKETCH = Operation[Candidates](
    "find_by_sketch", _triton("sketch_find", "find"), _selected("find")
)
SCORE_CANDIDATES = Operation[Tensor](  # the second half of a search
    "find_by_sketch", _triton("sketch_find", "exact_scores"), _selected("exact_scores")
)
ATTEND_CANDIDATES = _Attention(
    "attend_candidates", _triton("sketch_attend", "attend"), _selected("attend")
)
BEST_LIMIT = Operation[Tensor](  # above which candidates are attended
    "attend_candidates", _triton("sketch_find", "best_limit"), _selected("best_limit")
)
ATTEND_UNREAD = Operation[tail.UnreadPart](
    "attend_unread", _triton("unread"), _defined(module=tail)
)

OPERATIONS = tuple(row for row in tuple(vars().values()) if isinstance(row, Operation))
BY_NAME: dict[str, Operation[object]] = {row.name: row for row in OPERATIONS}
