"""What the demo asks: four kinds of load whose prompts share prefixes, as programs around a model make them.

A scene gets `ask` and builds later prompts from earlier replies. The texts are such that a small model answers in few words.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tiercache.service import runners

if TYPE_CHECKING:
    from tiercache.service.runners import Conversation

REVIEWS = [
    ("The soup was cold, and the waiter forgot about us twice.", "negative"),
    ("Best holiday of my life: the sea, the people, the food!", "positive"),
    ("My phone broke after two days and nobody answers the mail.", "negative"),
    ("A warm and funny film. The children laughed all evening.", "positive"),
    ("The room smelled of smoke and the shower did not work.", "negative"),
    ("This lamp is bright, cheap, and easy to put together.", "positive"),
    ("The train was late again, and nobody told us why.", "negative"),
    ("What a kind doctor: she took her time and explained it all.", "positive"),
]
NEW_REVIEWS = [
    "I loved every page of this wonderful book.",
    "The shoes fell apart on the first rainy day.",
    "A terrible concert, far too loud and much too short.",
    "Friendly staff, clean rooms and a great breakfast.",
]

PUZZLE = """Answer with a short calculation.

Question: Ann has 3 apples and buys 4 more. How many apples does she have?
Answer: 3 + 4 = 7 apples.

Question: There are 12 birds on a tree and 5 fly away. How many birds are left?
Answer: 12 - 5 = 7 birds.

Question: A box holds 6 eggs. How many eggs are in 3 boxes?
Answer: 3 * 6 = 18 eggs.

Question: Tom has 20 coins and gives 8 of them to his sister. How many coins are left?
Answer: 20 - 8 = 12 coins.

Question: A bus has 5 seats in each of 4 rows. How many seats does it have?
Answer:"""

SYSTEM = "Answer questions about what a person tells you, in one short sentence."
EXAMPLES = [
    ("My dog Rex is two years old and likes to swim in the lake. What is my dog called?", "Your dog is called Rex."),
    ("We met in Oslo in May, when it rained every day. Where did we meet?", "You met in Oslo."),
    ("The new shop sells tea, bread and honey. What does it sell?", "It sells tea, bread and honey."),
]
"""How every chat begins, so that the model sees what is wanted of it."""
CHATS = [
    (
        "Ada",
        "My cat is called Minka. She is five years old, grey, and sleeps on the red sofa all day. At night she hunts mice in "
        "the garden of our neighbour, Mr Brown, who does not mind, because the mice eat his carrots. She eats fish on Fridays "
        "and chicken on all other days, and she drinks nothing but water. In winter she never leaves the house.",
        ["What is my cat called?", "Where does she sleep?", "What does she eat on Fridays?"],
    ),
    (
        "Ben",
        "On Monday I took the train from Paris to Rome. It left at nine in the morning and was two hours late. In Rome I met "
        "my old friend Carla, who paints ships. On Tuesday we ate pizza near the river and talked about our school. In the "
        "evening it rained, so we went to the cinema and saw a film about a lighthouse. On Wednesday I flew home.",
        ["Where did the train go?", "Who is Carla?", "What did we eat on Tuesday?"],
    ),
    (
        "Cleo",
        "For the cake you need four eggs, a cup of sugar, two cups of flour and three lemons. Beat the eggs with the sugar, add "
        "the flour and the juice of the lemons, and bake it for forty minutes. Let it cool, and serve it with cream. My "
        "grandmother made it every Sunday when I was small, and she always gave the first piece to our dog.",
        ["How many eggs do I need?", "How long do I bake it?", "What do I serve it with?"],
    ),
]

PROBLEM = """Task: plan a birthday party for a child who turns seven, with ten guests, at home, on a rainy day in autumn.
The party starts at three and ends at six. There is a living room with a large carpet, a kitchen with a big table, and a
cellar with old clothes, boxes, paper and paint. Two parents help. The budget is small, so nothing should be bought but cake,
fruit and juice. Every child should take something home that it made.

Think in steps. Write each step as one short sentence.

Step 1: Tidy the living room and put the boxes, the paper and the paint on the carpet.
Step 2:"""


AGAIN = ("Ada, turn 3", "Ben, turn 3", "review 1", "2 thoughts", "3 samples, a")
"""Which requests are asked once more after the restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt. With `seeds` it is answered once a seed, as a batch of samples; without, by the most likely tokens."""

    label: str
    prompt: tuple[int, ...]
    limit: int
    seeds: tuple[int, ...] = ()
    stop: tuple[int, ...] | None = None
    """Tokens that end the answer; None: the model's own."""


Replies = list[list[int]]
"""The new tokens of each sample; of one greedy answer when the request has no seeds."""
Ask = Callable[[Request], Awaitable[Replies]]


class Scene(Protocol):
    """One kind of load."""

    @property
    def title(self) -> str:
        """What is shown of it."""

    @property
    def requests(self) -> int:
        """How many requests it makes."""

    async def play(self, ask: Ask) -> None:
        """Ask everything, in order."""


@dataclass(frozen=True, slots=True)
class FewShot:
    """A batch: the same examples before each new case."""

    tokenizer: Any
    title: str = "Few-shot batch: eight examples, then a new review each time"
    requests: int = len(NEW_REVIEWS)

    async def play(self, ask: Ask) -> None:
        """Ask for the mood of each new review."""
        stem = "Is the review positive or negative?\n\n"
        stem += "".join(f"Review: {text}\nMood: {mood}\n\n" for text, mood in REVIEWS)
        end = tuple(self.tokenizer.encode("\n", add_special_tokens=False))
        for number, review in enumerate(NEW_REVIEWS, start=1):
            prompt = self.tokenizer.encode(f"{stem}Review: {review}\nMood:", add_special_tokens=False)
            await ask(Request(label=f"review {number}", prompt=tuple(prompt), limit=4, stop=end))


@dataclass(frozen=True, slots=True)
class SelfConsistency:
    """One question, several samples of its answer, decoded as a batch; the majority counts."""

    tokenizer: Any
    seed: int
    title: str = "Self-consistency: one question, a greedy answer, then samples in batches"
    requests: int = 3

    async def play(self, ask: Ask) -> None:
        """Ask once for the likeliest answer, then twice for three samples."""
        prompt = tuple(self.tokenizer.encode(PUZZLE, add_special_tokens=False))
        end = tuple(self.tokenizer.encode("\n", add_special_tokens=False))
        await ask(Request(label="greedy", prompt=prompt, limit=16, stop=end))
        for number in range(2):
            seeds = tuple(self.seed + 3 * number + sample for sample in range(3))
            await ask(Request(label=f"3 samples, {'ab'[number]}", prompt=prompt, limit=16, seeds=seeds, stop=end))


@dataclass(frozen=True, slots=True)
class Chats:
    """Chats that take turns: each turn's prompt is the whole chat so far."""

    tokenizer: Any
    title: str = "Interleaved chats: three people, three turns each, one system prompt"
    requests: int = sum(len(questions) for *_, questions in CHATS)

    async def play(self, ask: Ask) -> None:
        """Ask the first question of each chat, then the second of each, and so on."""
        chats = [self._opened() for _ in CHATS]
        for turn in range(max(len(questions) for *_, questions in CHATS)):
            for chat, (name, story, questions) in zip(chats, CHATS, strict=True):
                prompt = tuple(chat.ask(f"{story} {questions[0]}" if turn == 0 else questions[turn]))
                [reply] = await ask(Request(label=f"{name}, turn {turn + 1}", prompt=prompt, limit=16))
                chat.reply(reply)

    def _opened(self) -> Conversation:
        chat = runners.Conversation(self.tokenizer, system=SYSTEM)
        for question, answer in EXAMPLES:
            chat.ask(question)
            chat.reply([*self.tokenizer.encode(answer, add_special_tokens=False), self.tokenizer.eos_token_id])
        return chat


@dataclass(frozen=True, slots=True)
class TreeOfThoughts:
    """Thoughts that branch: two next steps are sampled, and each is thought on."""

    tokenizer: Any
    seed: int
    title: str = "Tree of thoughts: two next steps are sampled, each is thought on"
    requests: int = 3

    async def play(self, ask: Ask) -> None:
        """Sample two thoughts, then continue each."""
        root = tuple(self.tokenizer.encode(PROBLEM, add_special_tokens=False))
        end = tuple(self.tokenizer.encode("\n", add_special_tokens=False))
        thoughts = await ask(Request(label="2 thoughts", prompt=root, limit=16, seeds=(self.seed, self.seed + 1), stop=end))
        onward = self.tokenizer.encode("Step 3:", add_special_tokens=False)
        for name, thought in zip("ab", thoughts, strict=True):
            ended = [] if tuple(thought[-1:]) == end else list(end)
            prompt = (*root, *thought, *ended, *onward)
            await ask(Request(label=f"thought {name}", prompt=prompt, limit=16, stop=end))


@dataclass(frozen=True, slots=True)
class Again:
    """Earlier requests once more, after the daemon was stopped and started: what is hit now comes from the SSD tier."""

    asked: Sequence[Request]
    labels: Sequence[str] = AGAIN
    title: str = "Asked again: earlier requests once more, after the restart"

    @property
    def requests(self) -> int:
        """How many requests it makes."""
        return len(self.labels)

    async def play(self, ask: Ask) -> None:
        """Ask those of the earlier requests that have the labels."""
        known = {request.label: request for request in self.asked}
        for label in self.labels:
            await ask(known[label])
