"""hybrid_kv inside vLLM on a CPU: decoding that selects what it attends."""
