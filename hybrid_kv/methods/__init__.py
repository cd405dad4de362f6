"""KV-cache methods, one file each; importing this package registers them."""

from hybrid_kv.methods.full import Full
from hybrid_kv.methods.hybrid import Hybrid
from hybrid_kv.methods.infllm import InfLLM
from hybrid_kv.methods.magic_pig import MagicPig
from hybrid_kv.methods.quest import Quest
from hybrid_kv.methods.retrieval import Flat, Hnsw, Ivf, RetrievalAttention
from hybrid_kv.methods.streaming_llm import StreamingLLM
from hybrid_kv.methods.tidal_decode import TidalDecode

__all__ = [
    "Flat",
    "Full",
    "Hnsw",
    "Hybrid",
    "InfLLM",
    "Ivf",
    "MagicPig",
    "Quest",
    "RetrievalAttention",
    "StreamingLLM",
    "TidalDecode",
]
