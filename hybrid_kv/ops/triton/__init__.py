"""Kernels for NVIDIA GPUs in Triton, one family a file; the files are imported when first used.

They compute what `reference` defines. With TRITON_INTERPRET=1 they run on the CPU, for tests.
"""
