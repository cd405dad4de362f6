"""KV-cache methods, one file each; importing this package registers them."""

from hybrid_kv.methods.full import Full
from hybrid_kv.methods.hybrid import Hybrid
from hybrid_kv.methods.quest import Quest
from hybrid_kv.methods.retrieval import Flat, Hnsw, Ivf, RetrievalAttention
from hybrid_kv.methods.streaming_llm import StreamingLLM

__all__ = ["Flat", "Full", "Hnsw", "Hybrid", "Ivf", "Quest", "RetrievalAttention", "StreamingLLM"]
