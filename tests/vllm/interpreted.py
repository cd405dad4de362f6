"""vLLM's own Triton attention on a CPU, by Triton's interpreter; to be imported before vLLM."""

from __future__ import annotations

import os

os.environ |= {
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",  # else vLLM takes no Triton without a driver
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}

import torch
import vllm.platforms

assert vllm.platforms.current_platform.is_cpu()  # looked up before what follows
# vLLM for CPUs would leave Triton out.
_stock = vllm.platforms.vllm_version_matches_substr
vllm.platforms.vllm_version_matches_substr = lambda text: False
import vllm.triton_utils  # noqa: E402

vllm.platforms.vllm_version_matches_substr = _stock
assert vllm.triton_utils.HAS_TRITON
torch.cuda.get_device_capability = lambda device=None: (8, 0)  # asked for a size of tiles

from vllm.v1.attention.backends import triton_attn  # noqa: E402

triton_attn.NUM_PAR_SOFTMAX_SEGMENTS = 2  # of 16, each of which is interpreted for milliseconds
