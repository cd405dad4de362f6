"""One decoder layer of transformers for one token: launched kernel by kernel, and as a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.pools import normal
from benchmarks.gpu_check.record import Recorder, need_cuda
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timing import timed
from hybrid_kv.models.load import load_model

_GRAPH_WARMUP = 3


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device = torch.device(settings["device"])
    model: Any = load_model(sizes.model, device=device, dtype=sizes.dtype, layers=1)
    hidden = normal((1, 1, model.config.hidden_size), sizes.dtype, device)
    position = torch.zeros(1, 1, dtype=torch.long, device=device)
    rotation = model.model.rotary_emb(hidden, position_ids=position)
    layer = model.model.layers[0]

    step = partial(layer, hidden, position_embeddings=rotation, position_ids=position)
    with torch.inference_mode():
        how = {"rounds": sizes.rounds, "least": sizes.calls}
        record.measure("decoder layer, eager", partial(timed, [step], device, **how))
        record.measure("decoder layer, graph", partial(replayed, step, device, sizes))


def replayed(step: Callable[[], object], device: torch.device, sizes: Sizes) -> dict[str, Any]:
    need_cuda(device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # libraries set themselves up outside of the capture
        for _ in range(_GRAPH_WARMUP):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return timed([graph.replay], device, rounds=sizes.rounds, least=sizes.calls)
