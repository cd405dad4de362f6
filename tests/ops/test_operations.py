"""The table of operations: every back end that serves here against the definition, odd sizes."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.ops import Ops, operations
from hybrid_kv.ops.operations import OPERATIONS, By, Operation, why_unavailable
from hybrid_kv.types import HIDDEN, BlockMask, PartialAttention
from tests.tolerances import Tolerance

ROOT = Path(__file__).parents[2]
ROWS = {name: row for name, row in vars(operations).items() if isinstance(row, Operation)}
DEFINED = {name: row for name, row in ROWS.items() if "reference" in row.by}


# What functions take ------------------------------------------------------------------------------


def arguments_of(by: By) -> ast.arguments:
    """Read from the source: where Triton is not installed, its modules cannot be imported."""
    if isinstance(by.module, ModuleType):
        path, name = Path(inspect.getsourcefile(by.function) or ""), by.function.__name__
    else:
        path, name = ROOT.joinpath(*by.module.split(".")).with_suffix(".py"), by.name
    body = ast.parse(path.read_text()).body
    (found,) = (one for one in body if isinstance(one, ast.FunctionDef) and one.name == name)
    return found.args


@pytest.mark.parametrize("name", DEFINED)
def test_every_back_end_takes_the_arguments_of_the_definition(name: str) -> None:
    *others, definition = DEFINED[name].by.values()
    assert definition.backend == "reference"
    asked = arguments_of(definition)
    keywords = {one.arg for one in asked.kwonlyargs} - {definition.uses}
    for by in others:
        if by.backend == "flashinfer":  # goes by lengths; `Ops.attend_pages` knows
            continue
        given = arguments_of(by)
        least = len(given.args) - len(given.defaults)
        assert least <= len(asked.args) <= len(given.args), by
        defaults = zip(given.kwonlyargs, given.kw_defaults, strict=True)
        needed = {one.arg for one, default in defaults if default is None}
        assert needed - keywords <= {by.uses}, by
        assert keywords | {by.uses} <= {None, *(one.arg for one in given.kwonlyargs)}, by


def test_rows_of_one_name_are_chosen_alike() -> None:
    """`choose_backend` looks at one of them."""
    for row in OPERATIONS:
        one = operations.BY_NAME[row.name]
        assert [(by.backend, by.needs) for by in row.by.values()] == [
            (by.backend, by.needs) for by in one.by.values()
        ]


# What functions compute ---------------------------------------------------------------------------


def dense(dtype: torch.dtype, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, 3, count, 72).to(dtype) for count in (queries, keys, keys))
    return q, k, v


def attend(dtype: torch.dtype) -> tuple[Any, ...]:
    return dense(dtype, 5, 37), {"scale": 0.2}


def attend_visible(dtype: torch.dtype) -> tuple[Any, ...]:
    positions = torch.stack([torch.randperm(50)[:37] for _ in range(2)])
    positions[0, :5] = HIDDEN
    return (*dense(dtype, 6, 37), positions, [30, 17]), {"new": 2, "scale": 0.2}


def attend_causal(dtype: torch.dtype) -> tuple[Any, ...]:
    return dense(dtype, 37, 37), {"scale": 0.2}


def attend_blocks(dtype: torch.dtype) -> tuple[Any, ...]:
    listed = torch.rand(2, 3, 4, 4) < 0.5
    return (*dense(dtype, 37, 300), BlockMask(listed, 10)), {"scale": 0.2}


def attend_at(dtype: torch.dtype) -> tuple[Any, ...]:
    return (*dense(dtype, 4, 300), torch.tensor([0, 70, 71, 299])), {"scale": 0.2}


def block_masses(dtype: torch.dtype) -> tuple[Any, ...]:
    q, k, _ = dense(dtype, 4, 300)
    return (q, k, torch.tensor([0, 70, 71, 299])), {"scale": 0.2, "softcap": 3.0}


def attend_retrieved(dtype: torch.dtype) -> tuple[Any, ...]:
    (q,), (k,), (v,) = (one[:1] for one in dense(dtype, 5, 37))
    bias = torch.randn(3, 5, 11)
    return (q, k, v, torch.randint(-3, 37, (3, 5, 11))), {"scale": 0.2, "bias": bias}


def attend_ragged(dtype: torch.dtype) -> tuple[Any, ...]:
    q, (k, v) = torch.randn(3, 5, 72).to(dtype), torch.randn(2, 61, 72).to(dtype)
    return (q, k, v, [1, 40, 9], [37, 0, 5]), {"scale": 0.2, "softcap": 3.0}


def merge(dtype: torch.dtype) -> tuple[Any, ...]:
    parts = [
        PartialAttention(torch.randn(3, 5, 72).to(kind), torch.randn(3, 5))
        for kind in (dtype, torch.float32, dtype)
    ]
    return (parts, dtype), {}


def page_scores(dtype: torch.dtype) -> tuple[Any, ...]:
    low = torch.randn(3, 37, 72).to(dtype)
    return (torch.randn(3, 5, 72).to(dtype), low, low + 1), {}


EXAMPLES = {
    "ATTEND": attend,
    "ATTEND_VISIBLE": attend_visible,
    "ATTEND_CAUSAL": attend_causal,
    "ATTEND_BLOCKS": attend_blocks,
    "ATTEND_AT": attend_at,
    "BLOCK_MASSES": block_masses,
    "ATTEND_RETRIEVED": attend_retrieved,
    "ATTEND_RAGGED": attend_ragged,
    "MERGE": merge,
    "PAGE_SCORES": page_scores,
}
"""Of the rows that something beside Triton computes on the CPU; tests/ops/triton has the others."""


def test_every_row_that_the_host_computes_has_an_example() -> None:
    on_host = {name for name, row in DEFINED.items() if {"native", "torch_cpu"} & row.by.keys()}
    assert on_host == EXAMPLES.keys()


SERVED = [
    (name, backend)
    for name in EXAMPLES
    for backend in ROWS[name].by
    if backend in ("native", "torch_cpu", "triton") and why_unavailable(backend) is None
]


@pytest.mark.parametrize(("name", "backend"), SERVED)
def test_every_back_end_computes_what_the_definition_says(
    name: str, backend: str, dtype: torch.dtype, tolerance: Tolerance
) -> None:
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("the examples lie on the CPU; tests/ops/triton has them on a GPU")
    args, options = EXAMPLES[name](dtype)
    row = ROWS[name]
    found = Ops(backend).bound(row, backend)(*args, **options)
    if name == "ATTEND_VISIBLE":  # for the definition `newest` lies on the device
        args = (*args[:4], torch.tensor(args[4]))
    exact = row.by["reference"].function(*args, **options)
    if isinstance(exact, Tensor):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-4)
        return
    torch.testing.assert_close(found.out.float(), exact.out.float(), **tolerance)
    torch.testing.assert_close(found.lse, exact.lse, **tolerance)
