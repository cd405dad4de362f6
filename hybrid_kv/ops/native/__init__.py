"""The native engine (C++ in `native/`), entered through ctypes, which releases the GIL."""
