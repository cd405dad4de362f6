"""Index kinds over cold keys; the module of one is imported when its name is asked for."""

BUILT_IN = {
    "auto": "auto",
    "blocks": "pages",
    "clusters": "clusters",
    "flat": "flat",
    "frames": "pages",
    "graph": "graph",
    "hnsw": "faiss_kinds",
    "ivf": "faiss_kinds",
    "label_channels": "projections",
    "landmarks": "pages",
    "lsh": "hashing",
    "pages": "pages",
    "pca": "projections",
    "pq": "projections",
    "query_channels": "projections",
    "query_lists": "clusters",
    "sketch": "sketch",
    "skewed_channels": "projections",
}
"""Names of index kinds, each with the module that registers it."""
