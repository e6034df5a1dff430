"""Writes stories.txt: 160 kB of small stories from a grammar, the same in every run, for `examples/text_gpt.py`.

The text is generated and dedicated to the public domain (CC0 1.0). What follows from what is in it to be learned:
spelling, who is "he" and who is "she", which animal makes which sound, sums below twenty.

    python examples/data/make_stories.py
"""

import random
from pathlib import Path

N_BYTES = 160_000
PEOPLE = {"Anna": "she", "Bruno": "he", "Clara": "she", "David": "he", "Emma": "she", "Felix": "he"}
SOUNDS = {"dog": "barked", "cat": "purred", "crow": "cawed", "cow": "mooed", "frog": "croaked", "owl": "hooted"}
PLACES = ("river", "market", "old mill", "hill", "forest", "harbour")
THINGS = ("apple", "shell", "coin", "feather", "button", "stone")
WEATHER = ("It was raining.", "The sun was out.", "There was snow on the roofs.", "The wind was strong.")


def story(draw: random.Random) -> str:
    name, animal, place, thing = (draw.choice(tuple(words)) for words in (PEOPLE, SOUNDS, PLACES, THINGS))
    pronoun, first, second = PEOPLE[name], draw.randint(2, 9), draw.randint(2, 9)
    return (
        f"{draw.choice(WEATHER)} {name} went to the {place}, and the {animal} went too. There {pronoun} found {first} "
        f"{thing}s, and then {second} more. Now {pronoun} had {first + second} {thing}s. The {animal} "
        f"{SOUNDS[animal]}, {name} laughed, and {pronoun} went home.\n"
    )


def main() -> None:
    draw, text = random.Random(0), ""
    while len(text) < N_BYTES:
        text += story(draw)
    Path(__file__).with_name("stories.txt").write_text(text)


if __name__ == "__main__":
    main()
