"""KV-cache methods, one file each; importing this package registers them."""

from hybrid_kv.methods.a2sf import A2SF
from hybrid_kv.methods.accurate_block import AccurateBlock
from hybrid_kv.methods.ada_pyramid import AdaPyramid
from hybrid_kv.methods.ada_snapkv import AdaSnapKV
from hybrid_kv.methods.by_head import ByHead
from hybrid_kv.methods.by_layer import ByLayer
from hybrid_kv.methods.chain import Chain
from hybrid_kv.methods.cskv import CSKV
from hybrid_kv.methods.ctkvr import CTkvr
from hybrid_kv.methods.d2o import D2O
from hybrid_kv.methods.double_sparsity import DoubleSparsity
from hybrid_kv.methods.duo_attention import DuoAttention
from hybrid_kv.methods.elastic_cache import ElasticCache
from hybrid_kv.methods.fastgen import FastGen
from hybrid_kv.methods.full import Full
from hybrid_kv.methods.gear import GEAR
from hybrid_kv.methods.h2o import H2O
from hybrid_kv.methods.headkv import HeadKV
from hybrid_kv.methods.hybrid import Hybrid
from hybrid_kv.methods.infinigen_proxy import InfiniGenProxy
from hybrid_kv.methods.infllm import InfLLM
from hybrid_kv.methods.keydiff import KeyDiff
from hybrid_kv.methods.keyformer import Keyformer
from hybrid_kv.methods.kivi import Kivi
from hybrid_kv.methods.kvmerger import KVMerger
from hybrid_kv.methods.kvquant import KVQuant
from hybrid_kv.methods.lm_infinite import LMInfinite
from hybrid_kv.methods.locret import Locret
from hybrid_kv.methods.loki import Loki
from hybrid_kv.methods.look_m import LookM
from hybrid_kv.methods.magic_pig import MagicPig
from hybrid_kv.methods.matryoshka_kv import MatryoshkaKV
from hybrid_kv.methods.pqcache import PQCache
from hybrid_kv.methods.pyramidkv import PyramidKV
from hybrid_kv.methods.quest import Quest
from hybrid_kv.methods.razor_attention import RazorAttention
from hybrid_kv.methods.rekv import ReKV
from hybrid_kv.methods.retrieval import Flat, Hnsw, Ivf, RetrievalAttention
from hybrid_kv.methods.retroinfer import RetroInfer
from hybrid_kv.methods.rotate_kv import RotateKV
from hybrid_kv.methods.saq import SAQ
from hybrid_kv.methods.scissorhands import Scissorhands
from hybrid_kv.methods.shadowkv import ShadowKV
from hybrid_kv.methods.shadowkv_keys import ShadowKVKeys
from hybrid_kv.methods.share import Share
from hybrid_kv.methods.snapkv import SnapKV
from hybrid_kv.methods.sparq import SparQ
from hybrid_kv.methods.streaming_llm import StreamingLLM
from hybrid_kv.methods.think import ThinK
from hybrid_kv.methods.tidal_decode import TidalDecode
from hybrid_kv.methods.tova import TOVA
from hybrid_kv.methods.zipcache import ZipCache
from hybrid_kv.methods.zipvl import ZipVL

__all__ = [
    "A2SF",
    "CSKV",
    "D2O",
    "GEAR",
    "H2O",
    "SAQ",
    "TOVA",
    "AccurateBlock",
    "AdaPyramid",
    "AdaSnapKV",
    "ByHead",
    "ByLayer",
    "CTkvr",
    "Chain",
    "DoubleSparsity",
    "DuoAttention",
    "ElasticCache",
    "FastGen",
    "Flat",
    "Full",
    "HeadKV",
    "Hnsw",
    "Hybrid",
    "InfLLM",
    "InfiniGenProxy",
    "Ivf",
    "KVMerger",
    "KVQuant",
    "KeyDiff",
    "Keyformer",
    "Kivi",
    "LMInfinite",
    "Loki",
    "LookM",
    "MagicPig",
    "MatryoshkaKV",
    "PQCache",
    "PyramidKV",
    "Quest",
    "RazorAttention",
    "ReKV",
    "RetrievalAttention",
    "RetroInfer",
    "RotateKV",
    "Scissorhands",
    "ShadowKV",
    "ShadowKVKeys",
    "Share",
    "SnapKV",
    "SparQ",
    "StreamingLLM",
    "ThinK",
    "TidalDecode",
    "ZipCache",
    "ZipVL",
]
