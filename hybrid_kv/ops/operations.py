"""The table of operations, and the choice of a back end for each call.

A row has the definition of an operation and its back ends with their needs. A call is computed
by the first whose needs it meets: what was asked for, what is here, what the operation is given.

Functions are named, so that no kernel is imported before it is called. All functions of a row take
the arguments of its definition.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from importlib import import_module
from types import ModuleType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from hybrid_kv.ops import native, tail
from hybrid_kv.ops.devices import DEVICE_BACKENDS, Uploads, backends_on, device_state
from hybrid_kv.ops.native.library import Pool, pool_here
from hybrid_kv.types import Candidates, PartialAttention

R = TypeVar("R")
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
"""A condition of a call; `choose_backend` says when each is met."""


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
    return _defined(name, "hybrid_kv.ops.reference_pages", uses)


def _selected(name: str) -> By:
    return _defined(name, "hybrid_kv.ops.sketch_select")


def _native(*needs: Need, name: str = "", module: ModuleType | str = native) -> By:
    return By("native", module, name, ("here", "cpu", *needs), "pool")


def _triton(module: str, name: str = "", *needs: Need, uses: str | None = None) -> By:
    module = f"hybrid_kv.ops.triton.{module}"
    return By("triton", module, name, ("here", "compiled", "floats", *needs), uses)


def _fused(op: str) -> tuple[By, By]:
    """Torch's kernels for each type of device."""
    needs: tuple[Need, ...] = ("floats", "plain", "pairs")
    return (
        By("torch_cpu", "hybrid_kv.ops.fused", op, ("cpu", *needs)),
        By("torch_cuda", "hybrid_kv.ops.fused", f"{op}_on_cuda", ("cuda", *needs)),
    )


_PROMPT = _native("suited", module="hybrid_kv.ops.native.prompt")
# It compiles for minutes at its first use, so it serves those who ask for it.
_FLASHINFER = By(
    "flashinfer", "hybrid_kv.ops.flashinfer", needs=("here", "asked", "halves", "plain")
)
_Attention = Operation[PartialAttention]

ATTEND = _Attention("attend", _native("suited"), *_fused("attend"), _defined())
ATTEND_VISIBLE = _Attention("attend_visible", _native("few"), _defined(uses="attend"))
ATTEND_CAUSAL = _Attention("attend_causal", _PROMPT, *_fused("attend_causal"), _defined())
ATTEND_WITH_MASSES = Operation[tuple[PartialAttention, Tensor]]("attend_with_masses", _PROMPT)
_SPARSE = "hybrid_kv.ops.reference"
_TILES = _native(module="hybrid_kv.ops.native.prompt")
_SELECTED = "hybrid_kv.ops.native.selected"
ATTEND_BLOCKS = _Attention(
    "attend_blocks",
    _PROMPT,
    _triton("blocks", "", "suited"),
    _defined(module=_SPARSE),
)
ATTEND_AT = _Attention("attend_at", _TILES, _defined(module=_SPARSE))
BLOCK_MASSES = Operation[Tensor]("block_masses", _TILES, _defined(module=_SPARSE))
ATTEND_RETRIEVED = _Attention("attend_retrieved", _native(), _defined(uses="attend"))
ATTEND_RAGGED = _Attention(
    "attend_ragged",
    _native("few", module=_SELECTED),
    _triton("paged", uses="uploads"),
    _defined(uses="attend"),
)
ATTEND_PAGES = _Attention("attend_pages", _triton("paged"), _FLASHINFER, _defined(uses="attend"))
MERGE = _Attention("merge", _native(), _triton("paged"), _defined())
PLAN_STEP = Operation[None]("plan_step", _native(name="LayerPlan"))

PAGE_SCORES = Operation[Tensor](
    "page_scores",
    _native(module=_SELECTED),
    _triton("digests"),
    _of_pages(),
)
CHOOSE_PAGES = Operation[Tensor]("choose_pages", _triton("digests"), _of_pages(uses="page_scores"))
CHOOSE_LISTED = Operation[Tensor](
    "choose_listed", _triton("digests", "listed_page_scores"), _of_pages("listed_page_scores")
)
APPEND = Operation[None]("append", _triton("digests", "append_token", "few"))
APPEND_AT = Operation[None]("append_at", _triton("digests"), _of_pages())
UPDATE_DIGESTS = Operation[None]("update_digests", _triton("digests"), _of_pages())
COPY_PAGES = Operation[None]("copy_pages", _triton("digests"), _of_pages())
PAGE_WRITER = Operation[None]("page_writer", _native(name="PageWriter"))

NEAREST_KEYS = Operation[Tensor]("nearest_keys", _triton("nearest"), _defined())
ENCODE_SKETCH = Operation[None](
    "encode_sketch", _triton("sketch_scan", "encode"), _selected("encode")
)
FIND_BY_SKETCH = Operation[Candidates](
    "find_by_sketch", _triton("sketch_find", "find"), _selected("find")
)
SCORE_CANDIDATES = Operation[Tensor](  # the second half of a search
    "find_by_sketch", _triton("sketch_find", "exact_scores"), _selected("exact_scores")
)
ATTEND_CANDIDATES = _Attention(
    "attend_candidates", _triton("sketch_find", "attend"), _selected("attend")
)
BEST_LIMIT = Operation[Tensor](  # above which candidates are attended
    "attend_candidates", _triton("sketch_find", "best_limit"), _selected("best_limit")
)
ATTEND_UNREAD = Operation[tail.UnreadPart](
    "attend_unread", _triton("unread"), _defined(module=tail)
)

OPERATIONS = tuple(row for row in tuple(vars().values()) if isinstance(row, Operation))
BY_NAME: dict[str, Operation[object]] = {row.name: row for row in OPERATIONS}

# Choice of the back end of a call -----------------------------------------------------------------

BACKENDS = ("auto", "reference", "torch_cpu", "torch_cuda", "native", "triton", "flashinfer")
OPS = tuple(BY_NAME)

FUSED = {"torch_cpu": "cpu", "torch_cuda": "cuda"}
"""Torch's own fused kernels, with the type of device that each is for."""

_HALVES = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, *_HALVES)
_NATIVE, _NONE = frozenset({"native"}), frozenset[str]()


def choose_backend(
    requested: str,
    op: str,
    *,
    device_type: str,
    dtype: torch.dtype,
    here: Collection[str] = (),
    plain: bool = True,
    pairs: bool = True,
    few: bool = True,
    suited: bool = True,
) -> str:
    """The back end that computes one call: the first of the op's row whose needs the call meets.

    "reference", "torch_cpu" and "torch_cuda" use torch and nothing else. Any other name goes first
    where it has the op; what it has not, or cannot express, is computed as under "auto" and in the
    end by the definition.

    Args:
        requested: a name of BACKENDS.
        op: a name of OPS.
        here: the back ends beside torch's that are installed and reach the tensors.
        plain: attend, attend_causal: what torch has fused kernels for (no softcap, no sliding
            window); attend_pages: what FlashInfer has kernels for.
        pairs: there are queries and keys; torch's kernels take neither without the other.
        few: attend_visible, attend_ragged: few queries; the engine reads each key once for all of
            them. append: one token.
        suited: attend, attend_causal, attend_with_masses: the engine has a kernel for such queries,
            and torch no faster one here. attend_blocks: nobody goes backwards, for which there is
            no kernel.
    """
    backends = BY_NAME[op].by
    if requested in ("reference", *FUSED):
        backends = {name: by for name, by in backends.items() if name == requested}
    elif requested in backends:
        backends = {requested: backends[requested], **backends}
    for name, by in backends.items():
        asked = name == requested
        met: dict[Need, bool] = {
            "here": name in here,
            "asked": asked,
            "cpu": device_type == "cpu",
            "cuda": device_type == "cuda",
            # On the CPU Triton is its interpreter, which is for tests.
            "compiled": device_type != "cpu" or asked,
            "floats": dtype in _FLOATS,
            "halves": dtype in _HALVES,
            "plain": plain,
            "pairs": pairs,
            "few": few,
            "suited": suited,
        }
        if all(met[need] for need in by.needs):
            return name
    return "reference"


chosen = cache(choose_backend)  # each step asks a few times in the same words


@dataclass(frozen=True)
class ChosenBackend:
    """One requested back end, whose ops are computed by what `choose_backend` says.

    served: what computed the latest call of each op.
    """

    backend: str = "auto"
    served: dict[str, str] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def uploads(self) -> Uploads:
        """Index arrays on their devices; made when the first one travels."""
        return Uploads()

    @property
    def why_op_by_op(self) -> str | None:
        """Reason why the engine makes no decode step of a layer in one call; None where it may."""
        if self.backend in ("reference", *FUSED, *DEVICE_BACKENDS):
            return f"backend '{self.backend}' computes each op"
        if os.environ.get("HYBRID_KV_ONE_CALL") == "0":
            return "HYBRID_KV_ONE_CALL=0"
        return why_unavailable("native")

    @property
    def pool(self) -> Pool | None:
        """The threads that share the calling thread's work; None for itself alone."""
        return pool_here()

    def _here(self, at: Tensor) -> frozenset[str]:
        return backends_on(at.device.type, self.backend)

    def _choose(
        self,
        op: Operation[object],
        at: Tensor,
        far: Tensor | None = None,
        /,
        *,
        native: bool = False,
        **facts: bool,
    ) -> str:
        """The back end of a call, put on record.

        Args:
            at: on the device that computes. far: a tensor that kernels must reach.
            native: whether the engine reads the tensors. facts: others as `choose_backend` takes.
        """
        here = _NATIVE if native else _NONE
        if op.has_kernels and (far is None or reaches(at, far)):
            here = here | self._here(at)
        name = chosen(
            self.backend, op.name, device_type=at.device.type, dtype=at.dtype, here=here, **facts
        )
        self.served[op.name] = name
        return name

    def bound(self, op: Operation[R], name: str) -> Callable[..., R]:
        """The function of a back end, with the attribute of these ops that it uses."""
        by = op.by[name]
        function: Callable[..., R] = by.function
        return partial(function, **{by.uses: getattr(self, by.uses)}) if by.uses else function

    def _take(
        self, op: Operation[R], at: Tensor, far: Tensor | None = None, /, **facts: bool
    ) -> Callable[..., R]:
        """The function that computes a call; see `_choose`."""
        return self.bound(op, self._choose(op, at, far, **facts))


def reaches(near: Tensor, far: Tensor) -> bool:
    """Whether kernels on the device of one tensor read the other where it lies."""
    return near.device == far.device or far.is_pinned()


def device_of(backend: str) -> str | None:
    """The only type of device whose models a back end is for; None: any, or it is not there."""
    if backend in FUSED:
        return FUSED[backend]
    return device_state(backend).device_type if backend in DEVICE_BACKENDS else None


def why_unavailable(backend: str) -> str | None:
    """Reason why a known back end cannot serve on this machine, None where it can."""
    if backend == "torch_cuda" and not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    if backend == "native":
        state = native.engine_state()
        return state.detail if state.isa is None else None
    if backend in DEVICE_BACKENDS:
        device = device_state(backend)
        return device.detail if device.device_type is None else None
    return None
