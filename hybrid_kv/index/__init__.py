"""Index kinds over cold keys, one file each; importing the package registers them."""

from hybrid_kv.index import auto, flat, graph, hnsw, ivf, pages, sketch
