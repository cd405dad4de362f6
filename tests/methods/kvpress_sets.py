"""Run by a Python that has kvpress: what its presses keep of tensors in a file.

Each line of standard input names two files, "given.pt<TAB>kept.pt"; "kept" is the answer when the
second is written. Importing kvpress takes seconds, so one process serves many.

given.pt: `queries` [Hq, N, D], `keys`, `values` [Hkv, N, D], `weights` [Hq, N, N], `output`
[hidden, Hq * D], and the numbers of `settings`. Nothing of this project is imported.
"""

import sys
from types import SimpleNamespace

import kvpress
import torch


class GivenQueries(kvpress.ThinKPress):
    """ThinK's press of queries that are there already."""

    def compute_window_queries(self, module, hidden_states, position_embeddings):
        return hidden_states


def press(source, target):
    given = torch.load(source)
    queries, keys, values = (given[name][None] for name in ("queries", "keys", "values"))
    budget, window, pool, sinks = given["settings"].values()
    heads, (_, kv_heads, count, dim) = queries.shape[1], keys.shape
    config = SimpleNamespace(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        hidden_size=given["output"].shape[0],
        _attn_implementation="sdpa",
    )
    module = SimpleNamespace(
        config=config,
        head_dim=dim,
        num_key_value_groups=heads // kv_heads,
        o_proj=SimpleNamespace(weight=given["output"]),
        layer_idx=0,
    )
    hidden, weights = torch.zeros(1, count, 1), given["weights"][None]
    ratio = 1 - (budget + 0.5) / count  # so that rounding down leaves the budget
    snap = {"compression_ratio": ratio, "window_size": window, "kernel_size": pool}

    def best(press):
        scores = press.score(module, hidden, keys.clone(), values, weights, {})[0]
        return scores.topk(budget, dim=-1).indices

    snapped = kvpress.SnapKVPress(**snap)
    ada = kvpress.AdaKVPress(snapped, alpha_safeguard=0.0)
    ada.compress(module, hidden, keys.clone(), values, weights, {})
    _, masked_heads, masked = module.masked_key_indices
    dropped = torch.zeros(kv_heads, count, dtype=torch.bool)
    dropped[masked_heads, masked] = True

    think = GivenQueries(key_channel_compression_ratio=0.5, window_size=window)
    thin, _ = think.compress(
        module,
        hidden,
        keys.clone(),
        values,
        None,
        {"hidden_states": queries[:, :, -window:], "position_embeddings": None},
    )
    torch.save(
        {
            "snapkv": best(snapped),
            "criticalkv": best(kvpress.CriticalKVPress(kvpress.SnapKVPress(**snap))),
            "tova": best(kvpress.TOVAPress(ratio)),
            "keydiff": best(kvpress.KeyDiffPress(ratio)),
            "streaming_llm": best(kvpress.StreamingLLMPress(ratio, n_sink=sinks)),
            "ada_snapkv": [(~head).nonzero()[:, 0] for head in dropped],
            "think": (thin[0] != 0).any(1),
        },
        target,
    )


for line in sys.stdin:
    press(*line.rstrip("\n").split("\t"))
    print("kept", flush=True)
