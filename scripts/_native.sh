# Sourced after _env.sh, not run. Builds the native engine with its tests, apart from the package.

# native_flags ISA: how setup.py compiles the engine for an instruction set. Any Python reads them: there
# may be no .venv yet.
native_flags() {
    local reader=$python
    "$reader" -c '' 2>/dev/null || reader=$(find_python)
    "$reader" - "$root/native/flags.toml" "$1" <<'PY'
import sys, tomllib
with open(sys.argv[1], "rb") as file:
    flags = tomllib.load(file)
print(*flags["all"], *flags["isas"][sys.argv[2]])
PY
}

# isas: the names of all instruction sets that the engine is compiled for, the least first.
isas() {
    sed -n '/^\[isas\]/,$s/^\([a-z0-9]*\) = .*/\1/p' "$root/native/flags.toml"
}

# find_compiler: $CXX, or the first C++ compiler on PATH.
find_compiler() {
    local name
    for name in ${CXX:-g++ clang++}; do
        command -v "$name" && return
    done
    return 1
}

# compile COMPILER FOLDER SOURCES ISA [FLAG...]: FOLDER/*.o of native/SOURCES, unless they are there already;
# the flags come behind those of native/flags.toml.
compile() (
    compiler=$1 folder=$2 sources=$3 isa=$4
    shift 4
    cd "$root"
    read -ra flags < <(native_flags "$isa")
    flags+=("-DHKV_ISA_NAME=\"$isa\"" -Inative/include -fPIC "$@")
    key=$({ "$compiler" --version && echo "${flags[*]}" &&
        find native -type f -print0 | sort -z | xargs -0 cat; } | sha256sum)
    [[ -f $folder/key && $(<"$folder/key") == "$key" ]] && exit
    rm -rf "$folder"
    mkdir -p "$folder"
    cp native/src/standard.h "$folder"  # compiled once: half of what a small source takes
    "$compiler" "${flags[@]}" -x c++-header "$folder/standard.h" -o "$folder/standard.h.gch" || exit
    flags=(-include "$folder/standard.h" "${flags[@]}")
    (cd "native/$sources" && printf '%s\n' *.cpp) | xargs -P "$(nproc)" -I SOURCE \
        "$compiler" "${flags[@]}" -c "native/$sources/SOURCE" -o "$folder/SOURCE.o" &&
        echo "$key" >"$folder/key"
)

# build_native COMPILER ISA FOLDER TESTS [FLAG...]: FOLDER/run_tests, fuzz_search and engine_ISA.so. The tests
# know no instruction set: their objects lie in TESTS, which several folders may share.
build_native() {
    local compiler=$1 isa=$2 folder=$3 tests=$4
    shift 4
    compile "$compiler" "$tests" tests baseline "$@" &&
        compile "$compiler" "$folder/src" src "$isa" "$@" &&
        "$compiler" -pthread "$@" "$folder"/src/*.o "$tests"/{test_*,main}.cpp.o -o "$folder/run_tests" &&
        "$compiler" -pthread "$@" "$folder"/src/*.o "$tests/fuzz_search.cpp.o" -o "$folder/fuzz_search" &&
        "$compiler" -pthread "$@" -shared "$folder"/src/*.o -o "$folder/engine_$isa.so"
}

# buildable_isas COMPILER ISA...: those of the instruction sets that the compiler knows.
buildable_isas() {
    local compiler=$1 isa flags
    shift
    for isa in "$@"; do
        read -ra flags < <(native_flags "$isa")
        ! "$compiler" "${flags[@]}" -fsyntax-only -x c++ /dev/null 2>/dev/null || echo "$isa"
    done
}
