"""Which devices a model lies on, and what is said where a back end cannot serve there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hybrid_kv as hkv
from hybrid_kv.errors import BackendUnavailable, BackendWarning
from hybrid_kv.models import attach as attaching
from hybrid_kv.models.support import check_backend, devices_of
from hybrid_kv.transfer import ThreadExecutor
from hybrid_kv.transfer.cuda import CudaExecutor
from tests.models.folder import model
from tests.ops.fake_machine import Machine, fake_machine

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with fake_machine(monkeypatch) as made:
        made.modules = {"triton": object(), "flashinfer": object()}
        yield made


def test_a_spread_model_has_all_of_its_devices_in_order() -> None:
    built = model()
    built.model.layers[1].to("meta")  # as accelerate leaves what it fetches when it is needed
    assert devices_of(built) == [CPU]
    with FakeTensorMode():
        for layer, device in zip(built.model.layers, (SECOND, FIRST), strict=True):
            layer.mlp.up_proj.weight = nn.Parameter(torch.empty(3, device=device))
    assert devices_of(built) == [CPU, SECOND, FIRST]


def test_tokens_go_where_there_are_weights() -> None:
    """Not to the place of the first weights, which is none where they are fetched when needed."""
    built = model()
    built.model.embed_tokens.to("meta")
    assert built.device.type == "meta"
    with hkv.load(built) as llm:
        assert llm.encode([3, 4, 5]).device == CPU


@pytest.mark.parametrize("backend", ["auto", "triton", "flashinfer", "reference", "torch_cuda"])
@pytest.mark.parametrize("devices", [[FIRST], [FIRST, SECOND]])
def test_models_on_gpus_are_served(
    machine: Machine, backend: str, devices: list[torch.device]
) -> None:
    machine.capabilities = [(9, 0), (8, 0)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_backend(backend, devices)


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "torch_cuda"])
@pytest.mark.parametrize("devices", [[CPU], [FIRST, CPU], [CPU, FIRST]])
def test_a_model_that_lies_partly_elsewhere_is_refused(
    machine: Machine, backend: str, devices: list[torch.device]
) -> None:
    """Only the first of its devices was looked at."""
    listed = ", ".join(map(str, devices))
    with pytest.raises(
        BackendUnavailable,
        match=f"'{backend}' serves models on cuda, got one on {listed}; use backend='auto'",
    ):
        check_backend(backend, devices)
    check_backend("auto", devices)


@pytest.mark.parametrize("backend", ["auto", "triton", "flashinfer"])
def test_a_second_gpu_that_is_too_old_is_refused(machine: Machine, backend: str) -> None:
    machine.capabilities = [(9, 0), (7, 5)]
    with pytest.raises(
        BackendUnavailable,
        match=f"'{backend}' cannot serve here: cuda:1 has compute capability 7.5, 8.0 at least",
    ) as caught:
        check_backend(backend, [FIRST, SECOND])
    assert "use backend='torch_cuda'" in str(caught.value)
    check_backend("torch_cuda", [FIRST, SECOND])
    check_backend(backend, [FIRST])


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_a_gpu_that_is_too_old_is_refused_by_name(machine: Machine, backend: str) -> None:
    machine.capabilities = [(7, 5)]
    with pytest.raises(BackendUnavailable, match=r"cuda:0 has compute capability 7\.5"):
        check_backend(backend, [FIRST])


@pytest.mark.parametrize(
    ("modules", "capability", "why"),
    [
        ({"triton": object()}, (7, 5), "cuda:0 has compute capability 7.5, 8.0 at least"),
        ({}, (9, 0), r"triton is not installed \(pip install"),
        ({"triton": OSError("libcuda")}, (9, 0), "the import of triton fails: libcuda"),
    ],
)
def test_a_gpu_that_plain_torch_serves_under_auto_is_said(
    machine: Machine, modules: dict[str, object], capability: tuple[int, int], why: str
) -> None:
    machine.modules, machine.capabilities = modules, [capability]
    with pytest.warns(BackendWarning, match=f"torch does, more slowly: {why}"):
        check_backend("auto", [FIRST])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for backend in ("reference", "torch_cuda"):  # what was asked for is not slower than asked
            check_backend(backend, [FIRST])
        check_backend("auto", [CPU])


def test_a_back_end_that_cannot_serve_is_refused_when_the_model_is_attached() -> None:
    """It was refused by the first cache, and the model stayed attached."""
    built = model()
    with pytest.raises(BackendUnavailable, match="backend 'flashinfer' cannot serve here"):
        hkv.attach(built, hkv.HybridConfig(backend="flashinfer"))
    hkv.attach(built).close()


@pytest.mark.parametrize(
    ("devices", "kind"), [([CPU], ThreadExecutor), ([CPU, FIRST], CudaExecutor)]
)
def test_one_layer_on_a_gpu_is_enough_for_transfers_beside_it(
    monkeypatch: pytest.MonkeyPatch, devices: list[torch.device], kind: type
) -> None:
    monkeypatch.setattr(attaching, "devices_of", lambda _: devices)
    monkeypatch.setattr(attaching, "check_backend", lambda *_: None)
    with hkv.attach(model()) as runtime:
        assert type(runtime.cache().kv.executor) is kind
