"""The word-level tokenizer of the needle language, readable in both directions.

The model never sees a token between a key and its value (training fails with one), but a reader
wants one. So ``:`` and ``=`` exist in the text only: decoding writes them after the key of a
record, encoding drops them. Ids to text to ids is lossless.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_kv.eval.needle.facts import TOKENS

MAX_TOKENS = 1 << 18
_BYTE = "[0-9a-f]{2}"
_COLON_OPENERS = ("key", "tag", "vote", "one", "two", "three", "four")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, ready for `AutoTokenizer.from_pretrained` once saved.

    It adds no bos by itself: a context from `make_sample` begins with one already.
    """
    core = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(TOKENS)}, unk_token="<unk>")
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex("[:=,]"), " ")]
    )
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex("[.?]"), behavior="isolated"),
        ]
    )
    # The WordPiece decoder is used for its clean-up alone: it joins with spaces, but writes no
    # space before a full stop or question mark. A question mark opens a question here, hence
    # the space put back before it.
    steps = [decoders.WordPiece(prefix="##", cleanup=True), decoders.Fuse()]
    steps.append(decoders.Replace(Regex(r"(?<=\S)\?"), " ?"))
    for opener in _COLON_OPENERS:
        value = f"(?<={opener} {_BYTE} {_BYTE}) (?=[0-9a-f]{{2}}|(?!two|three|four)[a-z])"
        steps.append(decoders.Replace(Regex(value), ": "))
    steps.append(decoders.Replace(Regex("(?<=key pass code) (?=[0-9a-f]{2})"), ": "))
    steps.append(decoders.Replace(Regex(f"(?<=let {_BYTE} {_BYTE}) (?=[a-z0-9])"), " = "))
    core.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into `folder`."""
    build_tokenizer().save_pretrained(folder)
