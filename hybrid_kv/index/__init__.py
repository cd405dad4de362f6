"""Index kinds over cold keys; the module of one is imported when its name is asked for."""

BUILT_IN = {
    "auto": "auto",
    "blocks": "blocks",
    "clusters": "clusters",
    "flat": "flat",
    "frames": "frames",
    "graph": "graph",
    "hnsw": "hnsw",
    "ivf": "ivf",
    "label_channels": "label_channels",
    "landmarks": "landmarks",
    "lsh": "lsh",
    "pages": "pages",
    "pca": "pca",
    "pq": "pq",
    "query_channels": "query_channels",
    "query_lists": "query_lists",
    "sketch": "sketch",
    "skewed_channels": "skewed_channels",
}
"""Names of index kinds, each with the module that registers it."""
