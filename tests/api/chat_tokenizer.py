"""A tokenizer of characters and a few pairs for `architectures.build`, with chat templates."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.contracts.architectures import VOCAB

SPECIAL = ["<pad>", "<|s|>", "<|u|>", "<|a|>", "<|end|>"]
END = SPECIAL.index("<|end|>")

PLAIN = (
    "{% for m in messages %}"
    "{{ {'system': '<|s|>', 'user': '<|u|>', 'assistant': '<|a|>'}[m.role] }}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)
"""What it rendered for a conversation begins what it renders for the next turn of it."""

FORGETFUL = PLAIN.replace(
    "{{ m.content }}",
    "{{ m.content if m.role != 'assistant' or loop.last else m.content[2:] }}",
)
"""Leaves out parts of earlier answers, as templates of reasoning models do."""

STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<|u|>' if m.role == 'user' else '<|a|>' }}{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)
"""Takes no system message and trims, as Gemma's does."""


def chat_tokenizer(template: str | None = PLAIN) -> PreTrainedTokenizerBase:
    """Any token id that the model may write has a text; pairs are merged when text is encoded."""
    letters = ["\n", *map(chr, range(32, 127))]
    pairs = [(one, other) for one in ". aeiou" for other in "nrst\n"]
    pairs = pairs[: VOCAB - len(SPECIAL) - len(letters)]
    words = [*SPECIAL, *letters, *map("".join, pairs)]
    vocabulary = {word: idx for idx, word in enumerate(words)}
    assert len(vocabulary) == VOCAB
    backend = Tokenizer(models.BPE(vocabulary, pairs))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        additional_special_tokens=SPECIAL[1:],
        chat_template=template,
    )
    assert tokenizer.convert_tokens_to_ids("<|end|>") == END
    return tokenizer
