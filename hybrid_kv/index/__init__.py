"""Index kinds over cold keys, one file each; importing the package registers them."""

from hybrid_kv.index import (
    auto,
    blocks,
    clusters,
    flat,
    frames,
    graph,
    hnsw,
    ivf,
    label_channels,
    landmarks,
    lsh,
    pages,
    pca,
    pq,
    query_channels,
    query_lists,
    sketch,
    skewed_channels,
)
