"""The only place that knows transformers: attention function, cache, attach, loading."""
