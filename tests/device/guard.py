"""The device guard for CUDA of a machine that has none: operators that index ask for one.

CPU builds of PyTorch have no guard, and that of a CUDA build fails where there is no GPU. One that
does nothing is enough for both. It is compiled against torch's headers and stays in the process;
alone it gives nobody a device.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

_SOURCE = """#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
using NoOpCuda = NoOpDeviceGuardImpl<DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, NoOpCuda)
}
"""


@cache
def why_not() -> str:
    """Why no device can be emulated here; '' where one can. Compiles and loads the guard."""
    if torch.cuda.is_available():
        return "this machine has a GPU; a device is emulated only where there is none"
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "no C++ compiler: the device guard of an emulated device cannot be built"
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(_SOURCE)
        command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{home}/include"]
        command += [str(source), "-o", str(library), f"-L{home}/lib", "-lc10"]
        command += [f"-Wl,-rpath,{home}/lib"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"the device guard does not compile: {done.stderr.strip().splitlines()[0]}"
        ctypes.CDLL(str(library))
    return ""
