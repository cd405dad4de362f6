"""Compiles the native engine, once per instruction set; everything else is in pyproject.toml.

The engine is a plain C library that is loaded at run time, not a Python extension: setuptools
only brings the compiler. Where none works the package installs without it and says so.

A wheel has the libraries of all instruction sets. An editable install, and `build_ext --inplace`,
make those alone that this CPU runs, in half the time; HYBRID_KV_BUILD=all makes all of them, for a
checkout that several machines share.
"""

import copy
import ctypes
import os
import platform
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError

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

    def run(self) -> None:
        # Read here: setuptools sets `inplace` to 0 while it builds.
        self.for_this_cpu = bool(self.inplace or self.editable_mode)
        super().run()

    def build_extensions(self) -> None:
        self.parallel = self.parallel or os.cpu_count()
        if self.for_this_cpu and os.environ.get("HYBRID_KV_BUILD") != "all":
            self.keep(self.runnable())
        super().build_extensions()

    def runnable(self) -> set[str]:
        """Instruction sets that this CPU runs, as the engine says; all where nothing compiles."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                objects = self.compiler.compile(
                    [str(NATIVE / "src" / "library.cpp")],
                    output_dir=folder,
                    macros=[("HKV_ISA_NAME", '"baseline"')],
                    include_dirs=[str(NATIVE / "include")],
                    extra_postargs=FLAGS["all"],
                )
                path = str(Path(folder, "library.so"))
                self.compiler.link_shared_object(objects, path, target_lang="c++")
                library = ctypes.CDLL(path)
            except (CCompilerError, ExecError, PlatformError, OSError):
                return set(FLAGS["isas"])  # which are optional: each says why it cannot be built
            library.hkv_runnable_isas.restype = ctypes.c_char_p
            return set(library.hkv_runnable_isas().decode().split())

    def keep(self, isas: set[str]) -> None:
        """Leaves the other libraries out, and removes those that an earlier build has left."""
        kept = [ext for ext in self.extensions if ext.name.rpartition("_")[2] in isas]
        for ext in self.extensions:
            if ext not in kept:
                Path(self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        self.extensions = kept

    def build_extension(self, ext: Extension) -> None:
        # The libraries have the same sources: each needs a place for its objects.
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp, ext.name))
        flags = self.precompiled(ext, Path(own.build_temp))
        ext.extra_compile_args = [*flags, *ext.extra_compile_args]
        super(BuildEngine, own).build_extension(ext)

    def precompiled(self, ext: Extension, folder: Path) -> list[str]:
        """What includes the standard library's headers, compiled once for all sources: a fifth
        less to do. Nothing where that does not work.
        """
        folder.mkdir(parents=True, exist_ok=True)
        header = shutil.copy(str(NATIVE / "src" / "standard.h"), str(folder))
        compiler = getattr(self.compiler, "compiler_so_cxx", self.compiler.compiler_so)
        macros = [f"-D{name}={value}" for name, value in ext.define_macros]
        command = [*compiler, *macros, *ext.extra_compile_args, "-x", "c++-header", header]
        try:
            self.spawn([*command, "-o", f"{header}.gch"])
        except (CCompilerError, ExecError, PlatformError, OSError):
            return []
        return ["-include", header]


setup(
    ext_modules=[engine(isa) for isa in (FLAGS["isas"] if X86 else ["baseline"])],
    cmdclass={"build_ext": BuildEngine},
)
