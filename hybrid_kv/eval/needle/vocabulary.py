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

_HARBOUR = """harbour boat tide sailor anchor rope mast deck wave gull pier lantern captain
net fisher salt storm island shore cargo crew voyage compass reef current sail ferry dock
barrel lighthouse"""

_GARDEN = """garden rose seed soil rain root leaf bloom hedge path spade basket bee clover
orchard apple pear plum ivy moss fern willow shade pond stone bench gate wall sparrow nest"""

_KITCHEN = """kitchen bread butter flour oven pan soup onion pepper honey cheese spoon plate
table apron recipe dough sugar lemon garlic kettle tea cup bowl knife stove steam crumb dinner
supper"""

_TOWN = """town street market bridge tower square clock baker tailor window door roof chimney
corner shop coin wagon horse station train ticket crowd mayor school teacher letter paper news
bell church"""

_MOUNTAIN = """mountain valley river snow ice peak ridge cave eagle wolf pine cedar trail cabin
fire smoke wood axe cloud wind frost meadow goat shepherd spring waterfall glacier summit
boulder echo"""

_MUSIC = """music song violin drum flute piano singer dance stage voice chord rhythm melody
choir concert string trumpet audience curtain silence applause note tempo guitar harp verse
chorus tune rehearsal ballad"""

_SCIENCE = """science planet star moon orbit comet lens mirror signal metal glass magnet energy
atom crystal engine wheel lever theory number chart record sample battery copper iron silver
carbon motion measure"""

_PLAIN = """the and with under over near before after slowly quietly often always small large
old new bright quiet warm cold brings holds finds keeps leaves follows carries crosses watches
remembers"""

TOPICS: Final[tuple[tuple[str, ...], ...]] = tuple(
    tuple(block.split())
    for block in (_HARBOUR, _GARDEN, _KITCHEN, _TOWN, _MOUNTAIN, _MUSIC, _SCIENCE, _PLAIN)
)

FILLER_WORDS: Final[tuple[str, ...]] = tuple(word for topic in TOPICS for word in topic)

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
