"""Token ids of the needle language.

| ids      | meaning                                                              |
|----------|----------------------------------------------------------------------|
| 0..3     | pad, bos, eos, unk                                                   |
| 4..5     | ``.`` and ``?``                                                      |
| 6..15    | words that open records and questions: key, pass, code, tag, let, ...|
| 16..271  | the 256 bytes, written as hex pairs                                  |
| 272..511 | the 240 filler words                                                 |
"""

from __future__ import annotations

from typing import Final

from hybrid_kv.eval.needle.words import FILLER_WORDS, TOPICS

PAD: Final = 0
BOS: Final = 1
EOS: Final = 2
UNK: Final = 3
STOP: Final = 4
ASK: Final = 5
KEY: Final = 6
PASS: Final = 7
CODE: Final = 8
TAG: Final = 9
LET: Final = 10
VOTE: Final = 11
ORDINALS: Final = (12, 13, 14, 15)
FIRST_BYTE: Final = 16
NUM_BYTES: Final = 256
FIRST_WORD: Final = FIRST_BYTE + NUM_BYTES
NUM_WORDS: Final = len(FILLER_WORDS)
VOCAB_SIZE: Final = FIRST_WORD + NUM_WORDS

NUM_TOPICS: Final = len(TOPICS)
WORDS_PER_TOPIC: Final = len(TOPICS[0])
NUM_PLAIN_WORDS: Final = len(TOPICS[-1])

TOKENS: Final[tuple[str, ...]] = (
    *("<pad>", "<bos>", "<eos>", "<unk>", ".", "?"),
    *("key", "pass", "code", "tag", "let", "vote", "one", "two", "three", "four"),
    *(f"{value:02x}" for value in range(NUM_BYTES)),
    *FILLER_WORDS,
)
