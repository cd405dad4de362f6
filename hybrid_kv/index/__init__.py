"""Index kinds over cold keys, one file each; importing the package registers them."""

from hybrid_kv.index import auto, blocks, flat, graph, hnsw, ivf, lsh, pages, sketch
