"""Which back end computes a call, and what is said where the one asked for cannot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hybrid_kv.errors import BackendUnavailable
from hybrid_kv.ops import devices, get_ops
from hybrid_kv.ops.dispatch import Ops
from hybrid_kv.ops.operations import BACKENDS, OPS, choose_backend, why_unavailable
from hybrid_kv.types import PagedKV
from tests.ops.fake_machine import Machine, fake_machine

HOST_OPS = (
    *("attend", "attend_visible", "attend_causal", "attend_retrieved"),
    *("attend_with_masses", "attend_at", "block_masses"),
    *("plan_step", "page_writer"),
)
DEVICE_OPS = [op for op in OPS if op not in HOST_OPS]
EVERYTHING = ("native", "triton", "flashinfer")
HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("requested", "device", "dtype", "plain", "pairs", "chosen"),
    [
        ("auto", "cpu", torch.float32, True, True, "torch_cpu"),
        ("torch_cpu", "cpu", torch.bfloat16, True, True, "torch_cpu"),
        ("native", "cpu", torch.bfloat16, True, True, "torch_cpu"),
        ("triton", "cpu", torch.bfloat16, True, True, "torch_cpu"),
        ("reference", "cpu", torch.float32, True, True, "reference"),
        ("auto", "cuda", torch.float32, True, True, "torch_cuda"),
        ("triton", "cuda", torch.bfloat16, True, True, "torch_cuda"),
        ("auto", "cuda", torch.float64, True, True, "reference"),
        ("auto", "cuda", torch.bfloat16, False, True, "reference"),
        ("torch_cpu", "cuda", torch.float32, True, True, "reference"),
        ("torch_cuda", "cpu", torch.float32, True, True, "reference"),
        ("auto", "cpu", torch.float64, True, True, "reference"),
        ("auto", "cpu", torch.float32, False, True, "reference"),
        ("torch_cpu", "cpu", torch.float32, True, False, "reference"),
    ],
)
def test_dense_attention_is_fused_where_it_can_be(
    requested: str, device: str, dtype: torch.dtype, plain: bool, pairs: bool, chosen: str
) -> None:
    found = choose_backend(
        requested, "attend", device_type=device, dtype=dtype, plain=plain, pairs=pairs
    )
    assert found == chosen


@pytest.mark.parametrize("requested", ["auto", "native", "triton", "flashinfer"])
def test_few_queries_are_the_engine_s_and_many_are_not(requested: str) -> None:
    def chosen(device: str = "cpu", *, few: bool = True, plain: bool = True) -> str:
        return choose_backend(
            requested,
            "attend_visible",
            device_type=device,
            dtype=HALF,
            here=("native",),
            few=few,
            plain=plain,
        )

    assert chosen() == chosen(plain=False) == "native"
    assert chosen(few=False) == "reference"
    assert chosen("cuda") == "reference"


@pytest.mark.parametrize("op", ["attend", "attend_causal"])
@pytest.mark.parametrize("requested", ["auto", "native", "triton", "flashinfer"])
def test_prompts_are_the_engine_s_where_torch_is_no_faster(op: str, requested: str) -> None:
    def chosen(device: str = "cpu", *, suited: bool = True, plain: bool = True) -> str:
        return choose_backend(
            requested,
            op,
            device_type=device,
            dtype=HALF,
            here=("native",),
            suited=suited,
            plain=plain,
        )

    assert chosen() == chosen(plain=False) == "native"
    assert chosen(suited=False) == "torch_cpu"
    assert chosen(suited=False, plain=False) == "reference"
    assert chosen("cuda") == "torch_cuda"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_reference_is_the_reference_everywhere(op: str, device: str) -> None:
    found = choose_backend("reference", op, device_type=device, dtype=HALF, here=EVERYTHING)
    assert found == "reference"


@pytest.mark.parametrize("op", DEVICE_OPS)
def test_what_lies_on_a_gpu_is_served_there(op: str) -> None:
    for requested in ("auto", "native", "triton"):
        found = choose_backend(requested, op, device_type="cuda", dtype=HALF, here=EVERYTHING)
        assert found == "triton"
        assert choose_backend(requested, op, device_type="cuda", dtype=HALF) == "reference"
    assert (
        choose_backend("auto", op, device_type="cuda", dtype=torch.float64, here=EVERYTHING)
        == "reference"
    )


@pytest.mark.parametrize("op", DEVICE_OPS)
def test_interpreted_kernels_serve_only_those_who_ask(op: str) -> None:
    def chosen(requested: str) -> str:
        return choose_backend(requested, op, device_type="cpu", dtype=HALF, here=("triton",))

    assert chosen("triton") == "triton"
    assert chosen("auto") == chosen("native") == "reference"


@pytest.mark.parametrize(
    ("requested", "dtype", "plain", "chosen"),
    [
        ("flashinfer", torch.float16, True, "flashinfer"),
        ("flashinfer", torch.float16, False, "triton"),
        ("flashinfer", torch.float32, True, "triton"),
        ("auto", torch.float16, True, "triton"),
        ("triton", torch.float16, True, "triton"),
    ],
)
def test_flashinfer_serves_what_it_has_kernels_for_when_asked(
    requested: str, dtype: torch.dtype, plain: bool, chosen: str
) -> None:
    found = choose_backend(
        requested, "attend_pages", device_type="cuda", dtype=dtype, plain=plain, here=EVERYTHING
    )
    assert found == chosen


def test_flashinfer_is_never_taken_unasked() -> None:
    here = ("flashinfer",)
    found = choose_backend("auto", "attend_pages", device_type="cuda", dtype=HALF, here=here)
    assert found == "reference"


@pytest.mark.parametrize("requested", ["auto", "native", "triton", "flashinfer"])
def test_retrieved_entries_are_the_engine_s_whatever_serves_the_device(requested: str) -> None:
    def chosen(device: str, here: tuple[str, ...]) -> str:
        return choose_backend(
            requested, "attend_retrieved", device_type=device, dtype=HALF, here=here
        )

    assert chosen("cpu", ("native",)) == "native"
    assert chosen("cpu", ()) == chosen("cuda", ("native",)) == "reference"


def test_ragged_rows_are_the_engine_s_on_the_host_and_a_kernel_s_elsewhere() -> None:
    def chosen(device: str, here: tuple[str, ...], few: bool = True) -> str:
        return choose_backend(
            "auto", "attend_ragged", device_type=device, dtype=HALF, here=here, few=few
        )

    assert chosen("cpu", EVERYTHING) == "native"
    assert chosen("cuda", EVERYTHING) == "triton"
    assert chosen("cpu", ()) == chosen("cpu", EVERYTHING, few=False) == "reference"


def test_what_served_is_on_record() -> None:
    ops = Ops("auto")
    q = torch.randn(1, 2, 3, 8)
    bias = torch.zeros(3)
    ops.attend(q, q, q, scale=1.0, bias=bias)
    assert ops.served == {"attend": "torch_cpu"}
    ops.attend(q, q, q, scale=1.0, bias=bias, softcap=2.0)
    ops.nearest_keys(q[0], q[0], 1)
    assert ops.served == {"attend": "reference", "nearest_keys": "reference"}


@pytest.mark.skipif(why_unavailable("native") is not None, reason="no engine")
def test_the_engine_serves_a_decode_step_and_a_prompt() -> None:
    ops = Ops("auto")
    for queries in (64, 65):
        q = torch.randn(1, 2, queries, 8, dtype=HALF)
        part = ops.attend(q, q, q, scale=1.0)
        ops.merge([part, part], HALF)
        assert ops.served == {"attend": "native", "merge": "native"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with fake_machine(monkeypatch) as made:
        yield made


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_device_backend_says_what_it_lacks(machine: Machine, name: str) -> None:
    def refusal() -> str:
        machine.forget()
        with pytest.raises(BackendUnavailable) as error:
            get_ops(name)
        return str(error.value)

    start, end = f"backend '{name}' cannot serve here: ", "; use backend='auto'"
    install = f"{name} is not installed (pip install 'hybrid-kv[{name}]')"
    assert refusal() == start + install + end
    machine.modules[name] = OSError("libcuda.so.1: cannot open")
    assert refusal() == start + f"the import of {name} fails: libcuda.so.1: cannot open" + end
    machine.modules[name] = ModuleNotFoundError("No module named 'tvm_ffi'", name="tvm_ffi")
    assert refusal() == start + f"the import of {name} fails: No module named 'tvm_ffi'" + end
    # A broken wheel may raise anything; a traceback's worth of text is cut to its first line.
    machine.modules[name] = SystemExit("no CUDA toolkit\nline after line")
    assert refusal() == start + f"the import of {name} fails: no CUDA toolkit" + end
    machine.modules[name] = RuntimeError()
    assert refusal() == start + f"the import of {name} fails: RuntimeError" + end
    machine.capabilities = [(7, 5)]
    needed = "cuda:0 has compute capability 7.5, 8.0 at least is needed"
    assert refusal() == start + needed + end
    machine.gpu = False
    assert refusal() == start + "torch sees no NVIDIA GPU" + end


def test_a_gpu_and_its_packages_make_device_backends_usable(machine: Machine) -> None:
    machine.modules = {"triton": object(), "flashinfer": object()}
    assert devices.backends_on("cuda") == devices.backends_on("cuda", "triton") == {"triton"}
    assert devices.backends_on("cuda", "flashinfer") == {"triton", "flashinfer"}
    assert devices.backends_on("cpu") == frozenset()
    assert why_unavailable("triton") is None
    assert why_unavailable("flashinfer") is None


def test_flashinfer_is_not_even_imported_unasked(machine: Machine) -> None:
    """A broken one may crash or hang the process."""
    machine.modules = {"triton": object(), "flashinfer": object()}
    pages = PagedKV(*torch.zeros(2, 3, 9, 4, 64), torch.zeros(9, 4, dtype=torch.int64))
    for backend in ("auto", "triton", "native"):
        devices.backends_on("cuda", backend)
        Ops(backend).reads_pages(pages.k[None])
        if backend != "native" or why_unavailable(backend) is None:
            get_ops(backend)
    assert machine.imported == ["triton"]


def test_the_interpreter_serves_the_cpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.modules, machine.gpu = {"triton": object()}, False
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert devices.backends_on("cpu") == {"triton"}
    assert devices.backends_on("cuda") == frozenset()
    machine.modules = {}
    machine.forget()
    assert "not installed" in str(why_unavailable("triton"))


@pytest.mark.parametrize("name", [name for name in BACKENDS if why_unavailable(name) is None])
def test_a_usable_backend_is_given(name: str) -> None:
    assert get_ops(name).backend == name
