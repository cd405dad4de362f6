"""Products of llama.cpp (ggml) with packed weights, entered through ctypes.

The libraries are those of the npm package `@node-llama-cpp/linux-x64`, as in `benchmarks/peers`;
ggml itself chooses the best for this processor.
"""

from __future__ import annotations

import ctypes
import os
import re
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_FLOAT32, _CPU = 0, 0


class _InitParams(ctypes.Structure):
    """`ggml_init_params`: only descriptions of tensors lie in a context's own memory."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class Ggml:
    """ggml's CPU backend with one thread or more, out of a folder with its shared libraries."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._libraries = [
            ctypes.CDLL(str(next(folder.glob(pattern))), mode=ctypes.RTLD_GLOBAL)
            for pattern in ("libggml-base.so", "libggml.*so*")
        ]
        self._call("ggml_backend_load_all_from_path", None, str(folder).encode())
        self._device = self._call("ggml_backend_dev_by_type", c_void_p, c_int(_CPU))
        self._backend = self._call("ggml_backend_dev_init", c_void_p, self._device, None)
        if not self._backend:
            raise SystemExit("ggml has no backend for this CPU")
        set_threads = self._procedure(b"ggml_backend_set_n_threads", None, c_void_p, c_int)
        set_threads(self._backend, threads)
        self._plain = self._call("ggml_backend_get_default_buffer_type", c_void_p, self._backend)
        self._repacked = self._find_repacked()
        mapped = Path(f"/proc/{os.getpid()}/maps").read_text()
        self.build = ", ".join(sorted(set(re.findall(r"libggml-cpu[^/\s]*\.so", mapped))))

    def _call(self, name: str, result: Any, *arguments: Any) -> Any:
        function = next(
            (getattr(lib, name) for lib in reversed(self._libraries) if hasattr(lib, name)), None
        )
        if function is None:
            raise SystemExit(f"this ggml has no {name}; adapt llama_cpp.py")
        function.restype = result
        return function(*(c_void_p(a) if isinstance(a, int) else a for a in arguments))

    def _procedure(self, name: bytes, result: Any, *arguments: Any) -> Any:
        registry = self._call("ggml_backend_dev_backend_reg", c_void_p, self._device)
        place = self._call("ggml_backend_reg_get_proc_address", c_void_p, registry, name)
        if not place:
            raise SystemExit(f"this ggml has no {name.decode()}; adapt llama_cpp.py")
        return ctypes.CFUNCTYPE(result, *arguments)(place)

    def _find_repacked(self) -> int | None:
        extras = self._procedure(
            b"ggml_backend_dev_get_extra_bufts", ctypes.POINTER(c_void_p), c_void_p
        )(self._device)
        for buffer_type in extras or ():
            if buffer_type is None:
                break
            name = self._call("ggml_backend_buft_name", c_char_p, buffer_type)
            if b"REPACK" in name:
                return int(buffer_type)
        return None

    def _context(self) -> int:
        params = _InitParams(2**24, None, True)
        return int(self._call("ggml_init", c_void_p, params))

    def _allocate(self, context: int, buffer_type: int) -> None:
        name = "ggml_backend_alloc_ctx_tensors_from_buft"
        if not self._call(name, c_void_p, context, buffer_type):
            raise SystemExit("ggml grants no memory")

    def _set(self, tensor: int, values: npt.NDArray[Any]) -> None:
        self._call(
            "ggml_backend_tensor_set",
            None,
            *(tensor, values.ctypes.data, c_size_t(0), c_size_t(values.nbytes)),
        )

    def products(
        self,
        kind: int,
        blocks: npt.NDArray[np.uint8],
        inputs: npt.NDArray[np.float32],
        copies: int,
        repacked: bool,
    ) -> Products | None:
        """The products of some copies of a matrix with one set of inputs; None for a kind that is
        not repacked.

        kind: GGML's number. blocks: [N, bytes of a row]. inputs: [tokens, K].
        """
        buffer_type = self._repacked if repacked else self._plain
        if buffer_type is None:
            return None
        of_weights, of_others = self._context(), self._context()
        columns, rows = c_int64(inputs.shape[1]), c_int64(len(blocks))
        weights = [
            self._call("ggml_new_tensor_2d", c_void_p, of_weights, c_int(kind), columns, rows)
            for _ in range(copies)
        ]
        self._allocate(of_weights, buffer_type)
        x = self._call(
            "ggml_new_tensor_2d",
            c_void_p,
            *(of_others, c_int(_FLOAT32), columns, c_int64(len(inputs))),
        )
        graphs, outs = [], []
        for weight in weights:
            out = self._call("ggml_mul_mat", c_void_p, of_others, weight, x)
            if not self._call("ggml_backend_supports_op", c_bool, self._backend, out):
                return None
            graph = self._call("ggml_new_graph", c_void_p, of_others)
            self._call("ggml_build_forward_expand", None, graph, out)
            graphs.append(graph)
            outs.append(out)
        self._allocate(of_others, self._plain)
        for weight in weights:
            self._set(weight, blocks)
        self._set(x, inputs)
        return Products(self, graphs, outs[0], (len(inputs), len(blocks)))

    def compute(self, graph: int) -> None:
        """Runs one graph."""
        if self._call("ggml_backend_graph_compute", c_int, self._backend, graph) != 0:
            raise SystemExit("ggml has failed")

    def read(self, tensor: int, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
        """The values of a tensor of float32."""
        values = np.empty(shape, dtype=np.float32)
        self._call(
            "ggml_backend_tensor_get",
            None,
            *(tensor, values.ctypes.data, c_size_t(0), c_size_t(values.nbytes)),
        )
        return values


class Products:
    """Calls that multiply one copy of the weights each, in turn."""

    def __init__(self, ggml: Ggml, graphs: list[int], out: int, shape: tuple[int, int]) -> None:
        self._ggml, self._graphs, self._out, self._shape = ggml, graphs, out, shape
        self._next = 0

    def __call__(self) -> None:
        self._ggml.compute(self._graphs[self._next % len(self._graphs)])
        self._next += 1

    def outputs(self) -> npt.NDArray[np.float32]:
        """[tokens, N], of the first copy."""
        self._ggml.compute(self._graphs[0])
        return self._ggml.read(self._out, self._shape)
