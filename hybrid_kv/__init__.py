"""hybrid_kv: long contexts on one small GPU, by a KV cache in two tiers."""
