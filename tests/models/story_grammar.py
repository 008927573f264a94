"""A small, seeded grammar of children's stories: the training text of the test checkpoints.

Why a grammar of our own, and why it looks the way it does:

* The text has to be free of anyone else's rights, reproducible, and need no download.
* Token-exact tests compare greedy continuations, so the best token has to win clearly. A choice
  between equally likely words would be a coin flip decided by rounding; every choice here is
  weighted instead, and the favourite depends on what the story has said so far (see `pick`).
* Stories carry state that has to be copied from far back (names, colours, day numbers, the number
  of days announced at the start), so a wrong position, a lost cache block or a swapped head shows
  as a wrong word.
* Some words hold characters of two to four UTF-8 bytes (café, señor, 星, 🐶). The tokenizer is
  trained so that these need several tokens, which is what incremental detokenization must survive.
* Stories run from about 150 to more than 1000 tokens, most of them longer than 300, so long
  generations stay inside the distribution that the models know.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

NUMBERS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]


@dataclass(frozen=True)
class Hero:
    """The person the story is about, with the words that refer to them."""

    name: str
    kind: str
    he: str
    his: str


@dataclass(frozen=True)
class Pet:
    """The animal at the hero's side."""

    kind: str
    sign: str
    sound: str


GIRL, BOY = ("girl", "she", "her"), ("boy", "he", "his")
HEROES = [
    Hero(name, *(BOY if place % 2 else GIRL))
    for place, name in enumerate(
        ["Lily", "Tom", "Zoë", "Max", "Anna", "José", "Mia", "Ben", "Chloé", "小明"]
    )
]
PETS = (
    Pet("dog", "🐶", "Woof"),
    Pet("cat", "🐱", "Meow"),
    Pet("frog", "🐸", "Croak"),
    Pet("fox", "🦊", "Yip"),
    Pet("mouse", "🐭", "Squeak"),
    Pet("owl", "🦉", "Hoo"),
)
PET_NAMES = ("Bruno", "Pip", "Coco", "星", "Rusty", "Noël")
FRIENDS = ("señor Paco", "Grandma Ruth", "Captain Finn", "Mrs. Brown", "Uncle Björn")
HOMES = ("a little house by the sea", "a tall tower in the city", "an old mill near the woods")
TRAITS = ("brave", "naïve", "curious", "quiet", "clever")
COLOURS = ("red", "blue", "green", "yellow", "purple")
OBJECTS = ("kite", "drum", "lantern", "boat", "umbrella")
FOODS = ("crêpes", "apple pie", "jalapeño soup", "honey cakes", "noodles 🍜")
PLACES = ("the café", "the beach", "the garden", "the market", "the bridge", "the library")
MORNINGS = (
    "The sun was warm and bright ☀.",
    "Rain fell softly on the roof.",
    "A cold wind came from the north.",
    "Snow lay on every tree ❄.",
)
EVENTS = (
    'They met {friend} at {place}. "Good morning, {hero}!" said {friend}. "Would you like some '
    '{food}?" "Yes, please," said {hero}, and they ate until the plate was empty.',
    "{hero} took the {colour} {thing} to {place}. There {he} counted {number} birds: {counted}. "
    '"{Number} birds!" said {hero}. {pet_name} looked up and said, "{sound}!"',
    "Suddenly {pet_name} was gone! {hero} looked behind {place}, and {he} looked under the "
    'bridge. At last {he} heard a small "{sound}, {sound}!" It was {pet_name}, safe and sound.',
    "At {place} the {colour} {thing} fell into the water. {hero} was sad. Then {pet_name} the "
    "{pet} jumped in and brought it back. {hero} gave {pet_name} a big hug.",
    "{hero} paid {number} coins for some {food}. {He} gave one half to {pet_name} and one half to "
    '{friend}. "Thank you, {hero}," said {friend}. "You are very kind."',
    "In the evening they sat near {place} and looked at the sky 🌟. {hero} saw {number} stars: "
    '{counted}. "The Chinese word for star is 星," said {friend}.',
    "{friend} told them a secret: there was a treasure near {place}! {hero} and {pet_name} dug a "
    "deep hole. They found {number} old coins and a map of the island.",
    "{hero} painted a picture of {pet_name}. The {pet} was {colour}, the sky was green, and the "
    'sun had a hat. "It is a fine picture," said {friend}, and put it on the wall.',
    "They made {food} for {friend}. First they took {number} eggs, then a cup of milk, and then a "
    'little salt. "{sound}!" said {pet_name}, because it smelled so good.',
    "A lost child was crying at {place}. {hero} lent the child the {colour} {thing}, and soon the "
    'child was laughing. "Ha ha ha!" laughed {hero} too. 😊',
    "The {pet} could not sleep, so {hero} sang a song: La la la, little {pet}, la la la. After "
    "{number} songs {pet_name} closed both eyes and dreamed of {food}.",
    'They played hide and seek at {place}. {hero} closed {his} eyes and said, "{counted}! I am '
    'coming!" {pet_name} was hiding under the {colour} {thing}.',
)
ENDINGS = (
    "{hero} hugged {pet_name} the {pet} and went to bed. It had been a good time. The end.",
    'Then {hero} went home with the {colour} {thing}. "Good night, {pet_name}," {he} said. '
    "The end.",
    "And {hero}, {pet_name} and {friend} stayed friends for ever after. The end.",
)


def pick(rng: random.Random, options: Sequence[T], context: str, decay: float = 0.15) -> T:
    """Pick one option; each is `decay` times as likely as the one before it.

    The context decides which option is the favourite, so that the likely word varies from story
    to story and yet is never in doubt to someone who has read the story so far.
    """
    shift = zlib.crc32(context.encode()) % len(options)
    weights = [decay**rank for rank in range(len(options))]
    rank = rng.choices(range(len(options)), weights)[0]
    return options[(shift + rank) % len(options)]


@dataclass(frozen=True)
class Cast:
    """Everything that stays the same throughout one story."""

    hero: Hero
    pet: Pet
    pet_name: str
    friend: str
    colour: str
    thing: str
    food: str
    days: int

    def words(self) -> dict[str, Any]:
        """The words that the templates may use."""
        hero, pet = self.hero, self.pet
        words = {"hero": hero.name, "he": hero.he, "He": hero.he.capitalize(), "his": hero.his}
        return vars(self) | words | {"pet": pet.kind, "sound": pet.sound}


def pick_hero(rng: random.Random) -> Hero:
    """Choose a hero; a girl more often than a boy, so that an opening is not a coin flip."""
    kind = pick(rng, ("girl", "boy"), "girl or boy", decay=0.35)
    return pick(rng, [hero for hero in HEROES if hero.kind == kind], kind, decay=0.55)


def make_cast(rng: random.Random, hero: Hero) -> Cast:
    """Choose who and what a story about the hero is about."""
    pet = pick(rng, PETS, f"pet {hero.name}")
    thing = pick(rng, OBJECTS, f"thing {hero.name}")
    return Cast(
        hero=hero,
        pet=pet,
        pet_name=pick(rng, PET_NAMES, f"pet name {hero.name} {pet.kind}"),
        friend=pick(rng, FRIENDS, f"friend {hero.name}"),
        colour=pick(rng, COLOURS, f"colour {thing}"),
        thing=thing,
        food=pick(rng, FOODS, f"food {hero.name}"),
        days=1 + pick(rng, range(len(NUMBERS)), f"days {hero.name}", decay=0.8),
    )


def opening(rng: random.Random, cast: Cast) -> str:
    """Introduce the cast and say how many days the story takes."""
    hero, pet = cast.hero, cast.pet
    trait = pick(rng, TRAITS, "trait")
    home = pick(rng, HOMES, f"home {hero.name}")
    days = "one day" if cast.days == 1 else f"{NUMBERS[cast.days - 1]} days"
    return (
        f"Once upon a time there was a {trait} {hero.kind} named {hero.name}. "
        f"{hero.he.capitalize()} lived in {home} with a {pet.kind} named {cast.pet_name} "
        f"{pet.sign}. {hero.name} had a {cast.colour} {cast.thing}, liked {cast.food}, and had a "
        f"friend called {cast.friend}. This story took {days}."
    )


def one_day(rng: random.Random, cast: Cast, day: int, last_event: int) -> tuple[str, int]:
    """One paragraph, and the index of the event that it told."""
    seen = f"{cast.hero.name} {last_event}"
    event = pick(rng, range(len(EVENTS)), f"event {seen}")
    place = pick(rng, PLACES, f"place {cast.hero.name} {event}")
    number = 2 + pick(rng, range(6), f"number {event}")
    morning = pick(rng, MORNINGS, f"morning {cast.hero.name} {day}")
    body = EVENTS[event].format(
        place=place,
        number=NUMBERS[number - 1],
        Number=NUMBERS[number - 1].capitalize(),
        counted=", ".join(NUMBERS[:number]),
        **cast.words(),
    )
    return f"Day {day}. {morning} {body}", event


def tell(rng: random.Random, cast: Cast) -> str:
    """The whole story of one cast, in paragraphs."""
    paragraphs = [opening(rng, cast)]
    event = -1
    for day in range(1, cast.days + 1):
        paragraph, event = one_day(rng, cast, day, event)
        paragraphs.append(paragraph)
    ending = pick(rng, ENDINGS, f"ending {cast.hero.name} {event}")
    paragraphs.append(ending.format(**cast.words()))
    return "\n\n".join(paragraphs)


def chat_turn(role: str, text: str) -> str:
    """One message in the ChatML-like format of the test tokenizer."""
    return f"{IM_START}{role}\n{text}{IM_END}\n"


def tell_as_chat(rng: random.Random, cast: Cast) -> str:
    """A conversation in which the user asks for the story, and sometimes about it."""
    days = "1 day" if cast.days == 1 else f"{cast.days} days"
    request = pick(
        rng,
        (
            f"Tell me a story about {cast.hero.name}.",
            f"Tell me a story of {days} about {cast.hero.name}.",
            f"Please write about {cast.hero.name} and the {cast.pet.kind}.",
        ),
        "request",
        decay=0.6,
    )
    turns = [chat_turn("system", "You tell stories.")] if rng.random() < 0.3 else []
    turns += [chat_turn("user", request), chat_turn("assistant", tell(rng, cast))]
    if rng.random() < 0.5:
        question, answer = ask_about(rng, cast)
        turns += [chat_turn("user", question), chat_turn("assistant", answer)]
    return "".join(turns)


def ask_about(rng: random.Random, cast: Cast) -> tuple[str, str]:
    """A question about the story, and its answer."""
    pet, friend, hero = cast.pet.kind, cast.friend, cast.hero.name
    questions = (
        (f"What was the name of the {pet}?", f"The {pet} was named {cast.pet_name}."),
        (f"Who was the friend of {hero}?", f"The friend of {hero} was {friend}."),
        (f"What did {hero} like to eat?", f"{hero} liked {cast.food}."),
    )
    return pick(rng, questions, "question", decay=0.6)


def make_document(rng: random.Random, chat_share: float = 0.3) -> str:
    """One story or conversation, closed by the end-of-text token."""
    if rng.random() < chat_share:
        # Any hero, equally often: the answer has to follow the request, not the usual story.
        return tell_as_chat(rng, make_cast(rng, rng.choice(HEROES))) + END_OF_TEXT
    return tell(rng, make_cast(rng, pick_hero(rng))) + END_OF_TEXT


def make_corpus(seed: int, count: int, chat_share: float = 0.3) -> list[str]:
    """The same `count` documents for the same seed, on every machine."""
    rng = random.Random(seed)
    return [make_document(rng, chat_share) for _ in range(count)]
