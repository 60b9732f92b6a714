"""Names and figures for newswire stories.

Surnames and towns are built from syllables, so there are more than a hundred thousand of them. A checksum of its
letters assigns each of them to one split, so training never shows a name of the test stream.
"""

from __future__ import annotations

import random
import zlib

SPLITS = ("train", "val", "test")

_ONSETS = "b bl br c cl cr d dr f fl g gl gr h j k kl kr l m n p pl pr qu r s sk sl st str t th tr v w z".split()
_NUCLEI = "a e i o u ai ea ei ie oa ou".split()
_CODAS = "b ck d g l ld ll lm m n nd ng nk nn p r rd rk rn rt s sk ss st t th x".split()
_SURNAME_ENDS = "a ard as en er ez in ler ley man o off ova sen ski son ton well y".split()
_TOWN_ENDS = "berg bridge burn bury dale field ford gate ham haven hurst mouth port ton vale ville wick wood".split()

FIRST_NAMES = (
    "Ada Adam Agnes Alan Alice Amelia Amos Anita Anna Arthur Astrid Barbara Beatrice Bella Bernard Boris Brian "
    "Bruno Carla Carlos Cecil Celia Chloe Clara Colin Cora Cyril Dalia Daniel Daphne David Diana Diego Doris Dylan "
    "Edgar Edith Elena Elias Ella Emil Emma Enid Eric Esther Ethan Eva Felix Fiona Flora Frank Freda Gavin George "
    "Gilda Grace Greta Gustav Hanna Harold Hassan Hazel Hector Helen Henry Hilda Hugo Ian Ibrahim Ida Igor Ines "
    "Ingrid Irene Isaac Ivan Jack Jana Jasper Joan Jonas Judith Julia Karl Kate Keiko Kenji Lars Laura Leila Leo "
    "Liam Lionel Lisa Louis Lucia Lydia Mabel Magda Marco Maria Mark Martha Matteo Maya Milan Miles Miriam Mona "
    "Nadia Naomi Nelson Nina Noah Nora Olaf Olga Oliver Omar Oscar Otto Pablo Paula Pedro Petra Philip Piers Priya "
    "Quentin Rachel Ralph Ramon Raul Rita Robert Rosa Rupert Ruth Sam Sara Selma Silas Simon Sofia Stella Sven "
    "Tanya Tara Tessa Theo Thomas Tobias Ulla Uma Ursula Vera Victor Viola Walter Wanda Wilma Xavier Yara Yusuf "
    "Zara Zoe"
).split()

SECTORS = (
    "Airways Bank Breweries Cement Chemicals Dairies Electric Foods Freight Glass Hotels Insurance Mining Motors "
    "Outfitters Paper Petroleum Plastics Press Rail Robotics Shipping Software Steel Telecom Textiles Timber Tobacco "
    "Tools Water"
).split()
INSTITUTES = ("University", "Institute", "College", "Observatory", "Laboratory", "Academy")
CLUBS = ("Rovers", "United", "Athletic", "Wanderers", "City", "Rangers", "Albion", "Harriers")
MONTHS = "January February March April May June July August September October November December".split()
YEARS = range(1987, 2008)

ROLES = (
    "chief executive",
    "chairman",
    "finance director",
    "head of research",
    "treasurer",
    "general counsel",
    "president",
    "sales director",
    "chief engineer",
    "head of exports",
)
FACILITIES = (
    "warehouse", "factory", "refinery", "laboratory", "call centre", "shipyard", "training centre", "power station",
    "sawmill", "assembly plant",
)  # fmt: skip
FINDINGS = (
    "frog", "beetle", "orchid", "comet", "mineral", "fossil", "moss", "fish", "spider", "enzyme", "bat", "fungus",
)  # fmt: skip
CAUSES = (
    "flood", "storm", "fire", "landslide", "mudslide", "hailstorm", "tornado", "train crash", "gas leak", "blizzard",
)  # fmt: skip
CHARGES = (
    "fraud", "bribery", "tax evasion", "forgery", "arson", "smuggling", "perjury", "libel", "theft", "embezzlement",
)  # fmt: skip
GENRES = ("novel", "play", "opera", "film", "symphony", "poem", "memoir", "ballet")


class World:
    """Draws names and figures for one split. `unique` draws names that identify a story.

    Args:
        split: the split that all surnames and towns belong to.
        rng: source of randomness.

    Raises:
        ValueError: for an unknown split.
    """

    def __init__(self, split: str, rng: random.Random) -> None:
        if split not in SPLITS:
            raise ValueError(f"unknown newswire split {split!r}; choose one of {', '.join(SPLITS)}")
        self.split = split
        self.rng = rng
        self._used_names: set[str] = set()

    def _stem(self, ends: list[str]) -> str:
        """A capitalized name of this split, of two or three syllables."""
        choice = self.rng.choice
        while True:
            first = choice(_ONSETS) + choice(_NUCLEI) + choice(_CODAS)
            name = (first + choice(ends)).capitalize()
            if split_of(name) == self.split:
                return name

    def surname(self) -> str:
        return self._stem(_SURNAME_ENDS)

    def town(self) -> str:
        return self._stem(_TOWN_ENDS)

    def person(self) -> str:
        return f"{self.rng.choice(FIRST_NAMES)} {self.surname()}"

    def company(self) -> str:
        return f"{self.surname()} {self.rng.choice(SECTORS)}"

    def institute(self) -> str:
        return f"{self.town()} {self.rng.choice(INSTITUTES)}"

    def club(self) -> str:
        return f"{self.town()} {self.rng.choice(CLUBS)}"

    def title(self) -> str:
        pattern = self.rng.choice(
            ("The {0} of {1}", "Return to {1}", "{0} and {2}", "The Last {0}", "Letters from {1}")
        )
        nouns = (
            "Gardener",
            "Lighthouse",
            "Orchard",
            "Promise",
            "River",
            "Bridge",
            "Winter",
            "Sailor",
            "Mirror",
            "Clock",
        )
        return pattern.format(self.rng.choice(nouns), self.town(), self.surname())

    def unique(self, draw: str) -> str:
        """Draws with the method of this name until the result is new."""
        while True:
            name: str = getattr(self, draw)()
            if name not in self._used_names:
                self._used_names.add(name)
                return name

    def count(self) -> str:
        """A head count such as `85`, `340` or `2,600`."""
        value = self.rng.randint(11, 99) * self.rng.choice((1, 10, 100))
        return f"{value:,}"

    def millions(self) -> str:
        return f"${self.rng.randint(11, 989)} million"

    def thousands(self) -> str:
        return f"${self.rng.randint(11, 989)},000"

    def percent(self) -> str:
        return f"{self.rng.randint(41, 79)} percent"

    def score(self) -> str:
        high = self.rng.randint(1, 6)
        return f"{high}-{self.rng.randint(0, high - 1)}"


def split_of(name: str) -> str:
    """The split that a name belongs to: 8 % of all names to test, 4 % to val, the others to train."""
    bucket = zlib.crc32(name.lower().encode()) % 25
    return "test" if bucket < 2 else "val" if bucket == 2 else "train"
