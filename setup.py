"""Compiles the native engine, once per instruction set; everything else is in pyproject.toml.

The engine is a plain C library that is loaded at run time, not a Python extension: setuptools
only brings the compiler. Where none works the package installs without it and says so.
"""

import copy
import os
import platform
import sys
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

X86 = platform.machine().lower() in ("x86_64", "amd64")
NATIVE = Path("native")
FLAGS = tomllib.loads((NATIVE / "flags.toml").read_text())


def engine(isa: str) -> Extension:
    """One library of the whole engine, so that no instruction set leaks into another's code."""
    return Extension(
        f"hybrid_kv.ops.native.engine_{isa}",
        sources=sorted(str(path) for path in (NATIVE / "src").glob("*.cpp")),
        depends=sorted(str(path) for path in NATIVE.rglob("*.h")),
        include_dirs=[str(NATIVE / "include")],
        define_macros=[("HKV_ISA_NAME", f'"{isa}"')],
        extra_compile_args=[*FLAGS["all"], *FLAGS["isas"][isa]],
        extra_link_args=["-pthread"],
        language="c++",
        optional=True,
    )


class BuildEngine(build_ext):
    """Plain shared libraries: no interpreter in their names, no init function."""

    def get_ext_filename(self, ext_name: str) -> str:
        return str(Path(*ext_name.split("."))) + (".dylib" if sys.platform == "darwin" else ".so")

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extensions(self) -> None:
        self.parallel = self.parallel or os.cpu_count()
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        # The libraries have the same sources: each needs a place for its objects.
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp, ext.name))
        super(BuildEngine, own).build_extension(ext)


setup(
    ext_modules=[engine(isa) for isa in (FLAGS["isas"] if X86 else ["baseline"])],
    cmdclass={"build_ext": BuildEngine},
)
