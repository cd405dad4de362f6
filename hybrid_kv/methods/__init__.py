"""KV-cache methods, one file each; importing this package registers them."""

from hybrid_kv.methods.ada_pyramid import AdaPyramid
from hybrid_kv.methods.ada_snapkv import AdaSnapKV
from hybrid_kv.methods.duo_attention import DuoAttention
from hybrid_kv.methods.full import Full
from hybrid_kv.methods.h2o import H2O
from hybrid_kv.methods.hybrid import Hybrid
from hybrid_kv.methods.infllm import InfLLM
from hybrid_kv.methods.kivi import Kivi
from hybrid_kv.methods.magic_pig import MagicPig
from hybrid_kv.methods.pyramidkv import PyramidKV
from hybrid_kv.methods.quest import Quest
from hybrid_kv.methods.retrieval import Flat, Hnsw, Ivf, RetrievalAttention
from hybrid_kv.methods.snapkv import SnapKV
from hybrid_kv.methods.streaming_llm import StreamingLLM
from hybrid_kv.methods.think import ThinK
from hybrid_kv.methods.tidal_decode import TidalDecode
from hybrid_kv.methods.tova import TOVA

__all__ = [
    "H2O",
    "TOVA",
    "AdaPyramid",
    "AdaSnapKV",
    "DuoAttention",
    "Flat",
    "Full",
    "Hnsw",
    "Hybrid",
    "InfLLM",
    "Ivf",
    "Kivi",
    "MagicPig",
    "PyramidKV",
    "Quest",
    "RetrievalAttention",
    "SnapKV",
    "StreamingLLM",
    "ThinK",
    "TidalDecode",
]
