"""A decode step, or a prompt, in llama.cpp: one process, one JSON line.

The libraries are those of the npm package `@node-llama-cpp/linux-x64`, which has ggml's CPU code
once for every generation of processors; ggml itself chooses the best for this one, and its choice
is printed with the build. They are entered through ctypes. Parameters are structs by value whose
defaults it gives itself, so that only the places of a few fields must be known; a wrong place
shows, since defaults are checked. KV is filled through `llama_state_seq_set_data`, whose format is
that of a state which was read after three tokens, with more cells.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import struct
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int32, c_size_t, c_void_p
from itertools import product
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, quants

HIDDEN, FFN, Q_HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 4096
_KV_WIDTH = KV_HEADS * HEAD_DIM
_PRODUCTS = (
    ("attn_q", HIDDEN, HIDDEN),
    ("attn_k", _KV_WIDTH, HIDDEN),
    ("attn_v", _KV_WIDTH, HIDDEN),
    ("attn_output", HIDDEN, HIDDEN),
    ("ffn_gate", FFN, HIDDEN),
    ("ffn_up", FFN, HIDDEN),
    ("ffn_down", HIDDEN, FFN),
)
WEIGHTS = {"bf16": None, "f16": 1, "q8_0": 7, "q4_k_s": 14}
"""Kinds of weights, and the number that llama.cpp has for a file of them; bf16 is written here."""
KV_TYPES = {"f16": GGMLQuantizationType.F16, "q8_0": GGMLQuantizationType.Q8_0}
_N_CTX, _N_THREADS, _N_THREADS_BATCH, _FLASH, _TYPE_K, _TYPE_V = 0, 28, 32, 52, 104, 108
_DEFAULTS = {
    **{_N_CTX: 512, _N_THREADS: 4, _N_THREADS_BATCH: 4, _FLASH: -1},
    **{_TYPE_K: int(GGMLQuantizationType.F16), _TYPE_V: int(GGMLQuantizationType.F16)},
}
_LONG_MS = 8000.0
"""Steps end early once they have taken so long: some sides take a second a step."""
_Q_THREADS, _Q_FTYPE = 0, 4
_QUANTIZE_DEFAULTS = {_Q_THREADS: 0, _Q_FTYPE: 7}


class _Params(ctypes.Structure):
    """Room for parameters that are passed by value; what is too much is not looked at."""

    _fields_ = (("bytes", ctypes.c_uint8 * 512),)

    def change(self, defaults: dict[int, int], wanted: dict[int, int]) -> None:
        """Sets fields by their places, once the defaults show that these are right."""
        for place, value in defaults.items():
            if struct.unpack_from("<i", self.bytes, place)[0] != value:
                raise SystemExit("this llama.cpp has other parameters; adapt llama_cpp.py")
        for place, value in wanted.items():
            struct.pack_into("<i", self.bytes, place, value)


class _Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = (
        ("n_tokens", c_int32),
        *((name, c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    )


class Library:
    """llama.cpp's functions, out of a folder with its shared libraries."""

    def __init__(self, folder: Path) -> None:
        self._base = self._open(folder, "libggml-base.so")
        ggml = self._open(folder, "libggml.*so*")
        self._llama = self._open(folder, "libllama.*so*")
        self._quiet = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(lambda *_: None)
        self.call("llama_log_set", None, type(self._quiet), c_void_p)(self._quiet, None)
        load = ggml.ggml_backend_load_all_from_path
        load.restype, load.argtypes = None, [c_char_p]
        load(str(folder).encode())
        self.call("llama_backend_init", None)()

    @staticmethod
    def _open(folder: Path, pattern: str) -> ctypes.CDLL:
        found = [path for path in folder.glob(pattern) if "common" not in path.name]
        if len(found) != 1:
            raise SystemExit(f"{folder} must have one {pattern}, got {len(found)}")
        return ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)

    def call(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """A function by its name, with the types of what it returns and takes."""
        function = getattr(self._llama, name)
        function.restype, function.argtypes = result, list(arguments)
        return function  # type: ignore[no-any-return]

    @property
    def build(self) -> dict[str, str]:
        """Versions, the library for this processor, and the instruction sets that it names."""
        told = {}
        for name in ("ggml_version", "ggml_commit"):
            function = getattr(self._base, name)
            function.restype = c_char_p
            told[name] = function().decode()
        told["llama_version"] = self.call("llama_version", c_char_p)().decode()
        mapped = Path(f"/proc/{os.getpid()}/maps").read_text()
        told["cpu"] = ", ".join(sorted(set(re.findall(r"libggml-cpu[^/\s]*\.so", mapped))))
        told["system"] = self.call("llama_print_system_info", c_char_p)().decode()
        return told

    def quantize(self, source: Path, target: Path, weights: str) -> None:
        """Writes a model anew with other weights."""
        params = self.call("llama_model_quantize_default_params", _Params)()
        params.change(_QUANTIZE_DEFAULTS, {_Q_FTYPE: WEIGHTS[weights] or 0})
        run = self.call("llama_model_quantize", ctypes.c_uint32, c_char_p, c_char_p, c_void_p)
        if run(str(source).encode(), str(target).encode(), ctypes.addressof(params)) != 0:
            raise SystemExit(f"llama.cpp has refused to write {weights}")


def write_model(path: Path, layers: int) -> None:
    """Layers of the Llama-3-8B shape with random bf16 weights, as a GGUF file."""
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(layers)
    writer.add_context_length(2**18)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(Q_HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("none")
    draw = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int) -> None:
        values = draw.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        writer.add_tensor(
            f"{name}.weight", bits.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16
        )

    add("token_embd", VOCAB, HIDDEN)
    add("output", VOCAB, HIDDEN)
    for layer, (name, rows, columns) in product(range(layers), _PRODUCTS):
        add(f"blk.{layer}.{name}", rows, columns)
    norms = [f"blk.{layer}.{of}_norm" for layer in range(layers) for of in ("attn", "ffn")]
    for name in ("output_norm", *norms):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Llama:
    """The model and one context of it, with flash attention or without, KV of one type."""

    def __init__(
        self, library: Library, path: Path, room: int, threads: int, flash: bool, kv: str
    ) -> None:
        self._call, self._kv = library.call, KV_TYPES[kv]
        defaults = self._call("llama_model_default_params", _Params)()
        load = self._call("llama_model_load_from_file", c_void_p, c_char_p, _Params)
        model = load(str(path).encode(), defaults)
        params = self._call("llama_context_default_params", _Params)()
        wanted = {_N_CTX: room, _N_THREADS: threads, _N_THREADS_BATCH: threads, _FLASH: int(flash)}
        params.change(_DEFAULTS, {**wanted, _TYPE_K: int(self._kv), _TYPE_V: int(self._kv)})
        make = self._call("llama_init_from_model", c_void_p, c_void_p, _Params)
        self._context = make(model, params) if model else None
        if not self._context:
            raise SystemExit("llama.cpp has refused the model or the context")
        self._one = self._call("llama_batch_get_one", _Batch, c_void_p, c_int32)
        self._decode = self._call("llama_decode", c_int32, c_void_p, _Batch)
        self._logits = self._call("llama_get_logits_ith", POINTER(c_float), c_void_p, c_int32)

    def feed(self, tokens: int) -> None:
        """Computes some tokens, in batches of 2,048, and waits for the last one's logits."""
        for first in range(0, tokens, 2048):
            count = min(2048, tokens - first)
            ids = (c_int32 * count)(*(i % VOCAB for i in range(first, first + count)))
            if self._decode(self._context, self._one(ids, count)) != 0:
                raise SystemExit("llama_decode failed")
        if not np.isfinite(self._logits(self._context, -1)[0]):
            raise SystemExit("llama.cpp's logits are not finite")

    def fill(self, cells: int, layers: int) -> None:
        """Replaces what was fed, three tokens, by a context of random KV."""
        size = self._call("llama_state_seq_get_size", c_size_t, c_void_p, c_int32)
        read = self._call(
            "llama_state_seq_get_data", c_size_t, c_void_p, c_void_p, c_size_t, c_int32
        )
        known = (ctypes.c_uint8 * size(self._context, 0))()
        length = read(self._context, known, len(known), 0)
        state = _longer(bytes(known[:length]), 3, cells, layers, self._kv)
        self._call("llama_memory_clear", None, c_void_p, ctypes.c_bool)(
            self._call("llama_get_memory", c_void_p, c_void_p)(self._context), True
        )
        write = self._call(
            "llama_state_seq_set_data", c_size_t, c_void_p, c_void_p, c_size_t, c_int32
        )
        if write(self._context, state.ctypes.data, state.nbytes, 0) != state.nbytes:
            raise SystemExit("llama.cpp has refused the state; its format differs from ours")


def _longer(
    state: bytes, cells: int, wanted: int, layers: int, kv: GGMLQuantizationType
) -> npt.NDArray[np.uint8]:
    """A state of one sequence with more cells and random keys and values.

    It is a header, its cells, some words whose last is the number of layers, then all layers' keys
    and all layers' values, each behind a header of its own.
    """
    words = struct.unpack_from("<4I", state)
    draw = np.random.default_rng(1)
    noise = draw.standard_normal((1024, _KV_WIDTH), dtype=np.float32)
    rows = quants.quantize(noise, kv).view(np.uint8)  # [1024, bytes of a cell's keys]
    kv_bytes, header = cells * rows.shape[1], 12
    cells_end = 16 + 12 * cells  # behind position, number of sequences and sequence of each cell
    keys = len(state) - 2 * layers * (kv_bytes + header)
    between = keys - cells_end
    if (
        words[3] != cells
        or between not in range(4, 32)
        or struct.unpack_from("<I", state, keys - 4)[0] != layers
    ):
        raise SystemExit("llama.cpp's state has another format; adapt llama_cpp.py")
    places = np.zeros((wanted, 3), dtype=np.uint32)
    places[:, 0], places[:, 1] = np.arange(wanted), 1
    body = np.resize(rows, wanted * rows.shape[1])
    parts = [
        np.frombuffer(struct.pack("<4I", *words[:3], wanted), dtype=np.uint8),
        places.reshape(-1).view(np.uint8),
        np.frombuffer(state[cells_end:keys], dtype=np.uint8),
    ]
    for at in range(keys, len(state), header + kv_bytes):
        parts += [np.frombuffer(state[at : at + header], dtype=np.uint8), body]
    return np.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, required=True, help="folder of shared libraries")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--quantize", choices=list(WEIGHTS), help="writes --gguf out of --source")
    parser.add_argument("--source", type=Path)
    parser.add_argument("--context", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=1, help="of the model in the file")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--flash", action="store_true")
    parser.add_argument("--kv", choices=list(KV_TYPES), default="f16")
    parser.add_argument("--prompt", action="store_true", help="computes it: time to first token")
    args = parser.parse_args()
    library = Library(args.library)
    if args.quantize is not None:
        library.quantize(args.source, args.gguf, args.quantize)
        print(json.dumps({"bytes": args.gguf.stat().st_size}))
        return
    room = args.context + args.steps + 256
    llama = Llama(library, args.gguf, room, args.threads, args.flash, args.kv)
    times: list[tuple[float, float]] = []

    def timed(tokens: int) -> None:
        begin, begin_cpu = perf_counter(), process_time()
        llama.feed(tokens)
        times.append((1e3 * (perf_counter() - begin), 1e3 * (process_time() - begin_cpu)))

    llama.feed(3)
    if args.prompt:
        timed(args.context)
    else:
        llama.fill(args.context, args.layers)
        while len(times) < args.steps and sum(wall for wall, _ in times) < _LONG_MS:
            timed(1)
    print(json.dumps({"times_ms": times, "build": library.build}))


if __name__ == "__main__":
    main()
