"""Which requests run which tokens in the next step: knows no model and no memory, only numbers of tokens.

A step holds one token of every request that is decoding, and some tokens of prompts: first of the one with the least
left, and now and then by turns. Several prompts share at most `piece` of them.
While prompts are read, steps without prompts come between, so that those who are decoding keep a share of their speed.

Requests have ranks. One of a later rank joins only where none of an earlier one is live or waits, and gives its slot up
as soon as one comes. So all that is live is of one rank, and what is read ahead runs no token beside a request.

A step has a fixed cost, such as reading all weights once, and a cost of each token. Tokens of a prompt that share a
step share its fixed cost. But every answer waits until the step ends, so a larger piece makes gaps longer. Where no
answer is being written nobody waits, and a step reads as much as the executor takes. Else a piece is so large that its
own work takes `OWN` times as long as the fixed cost. That is little where weights are in memory, and much where they
come from a disk or over a bus. Both costs are those of a line through the times of steps.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np

from pi_runtime.sequence.sequence import Rank

OWN = 2
"""The work of a piece's tokens, in fixed costs. This makes the product of a step's time and the square of a whole
prompt's least: the longest gap counts once, the time in which all wait twice. A prompt then takes at most half as long
again as in the largest steps, and a gap is three times the shortest one."""
LATEST = 4
"""Steps of a size whose shortest time counts: others may hold up a step, and nothing makes it faster than it is."""


class PieceSize:
    """Chooses how many tokens of a prompt run in a step beside answers: `LEAST`, doubled as often as it pays."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._steps: defaultdict[int, deque[tuple[float, int]]] = defaultdict(lambda: deque(maxlen=LATEST))
        """Seconds and tokens of the latest steps of each size, by powers of two."""
        self.tokens = min(LEAST, max_tokens)
        """The size of the next piece."""

    def count(self, seconds: float, tokens: int) -> None:
        """Count a step that held so many tokens of prompts."""
        self._steps[tokens.bit_length()].append((seconds, tokens))
        # Never more than twice what is known: a line says little of what is far away.
        limit = min(self._max_tokens, 2 * max(size for steps in self._steps.values() for _, size in steps))
        wanted = min(limit, self._worthwhile())
        self.tokens = min(LEAST, self._max_tokens)
        while 2 * self.tokens <= wanted:
            self.tokens *= 2

    def _worthwhile(self) -> float:
        """The tokens whose own work takes `OWN` times as long as the fixed cost."""
        seconds_N, tokens_N = np.array([min(steps) for steps in self._steps.values()]).T
        if len(tokens_N) == 1:
            return 2 * float(tokens_N[0])
        each_s, fixed_s = np.polyfit(tokens_N, seconds_N, 1, w=1 / np.maximum(seconds_N, 1e-9))
        return float(OWN * fixed_s / each_s) if each_s > 0 else np.inf


class PromptPace:
    """Says how many tokens of prompts the next step may read.

    `share`: the share of their speed that answers keep, 0 for prompts first. `piece`: tokens in a step, None to go by
    what steps took. `block`: most tokens that one sequence can bring.
    """

    def __init__(self, share: float, piece: int | None, block: int) -> None:
        self._share, self._waits = DecodeShare(share), share > 0
        self._piece, self._block, self._size = piece, block, PieceSize(block)

    def tokens(self, decoding: int, *, ahead: bool = False) -> int:
        """Most tokens of prompts in the next step, beside so many answers; 0 where prompts have to wait.

        `ahead`: whether nobody waits for these prompts, but a request that comes would wait for the step's end.
        """
        if not self._share.allows_prompts(decoding):
            return 0
        if self._piece is not None:
            return self._piece
        return self._size.tokens if (decoding or ahead) and self._waits else self._block

    def count(self, seconds: float, decoding: int, prompt_tokens: int, gained: float = 1.0) -> None:
        """Count a step: its time, its answers and tokens of prompts, and the tokens that each answer gained."""
        self._share.count(seconds, decoding, prompt_tokens > 0, gained)
        if prompt_tokens:
            self._size.count(seconds, prompt_tokens)


PIECE = 32
"""Tokens that several prompts share in a step, unless asked otherwise."""
LEAST = 16
"""The fewest that one gets beside answers. Where a token's own work is long, so few make the longest gaps three fifths
of those of 32, and a prompt is read about as early: what answers are owed after a piece is less in proportion."""
BY_TURNS = 4
"""One step with prompts in so many goes by turns. In the others the prompt with the least left comes first: then most
prompts that come together have their first token early."""
MOST_AGAIN = 64
"""Answers that wait to be read again: the oldest are forgotten."""
MAX_WITH_PROMPTS = 8
"""Steps with prompts in a row, so that the time of one without is measured now and then."""


class Schedulable(Protocol):
    """What the scheduler asks of a request."""

    @property
    def rank(self) -> Rank:
        """Which requests come before it."""

    @property
    def client(self) -> str:
        """Who asked: clients take turns where requests wait."""

    @property
    def is_decoding(self) -> bool:
        """Whether its next token is drawn after one more token has run; else its prompt is being read."""

    @property
    def block(self) -> int:
        """How many of its tokens may run in one step."""

    @property
    def num_pending(self) -> int:
        """How many of its tokens have not run yet."""


S = TypeVar("S", bound=Schedulable)


class WaitingQueue(Generic[S]):
    """Those that wait for a slot. Clients take turns, one request each; each client's own requests go in order.

    So a client with many requests does not keep those of another waiting.
    """

    def __init__(self) -> None:
        self._first: deque[S] = deque()
        """Those that come before all others."""
        self._by_client: dict[str, deque[S]] = {}
        """The round: the client whose turn it is comes first. None has an empty queue."""

    def __iter__(self) -> Iterator[S]:
        """All that wait; those of one client in order. Another thread may look too."""
        queues = [self._first, *self._by_client.values()]
        return iter([s for queue in queues for s in list(queue)])

    def append(self, request: S) -> None:
        """Let it wait behind all of its client."""
        self._by_client.setdefault(request.client, deque()).append(request)

    def append_next(self, request: S) -> None:
        """Let it wait before all of its client."""
        self._by_client.setdefault(request.client, deque()).appendleft(request)

    def append_first(self, request: S) -> None:
        """Let it wait before all others."""
        self._first.appendleft(request)

    @property
    def head(self) -> S | None:
        """The request whose turn it is; None where none waits."""
        queues = (queue for queue in (self._first, *self._by_client.values()) if queue)
        return next((queue[0] for queue in queues), None)

    def pop(self) -> None:
        """Take the head out; its client's next turn comes after those of all others."""
        request, is_turn = self.head, not self._first
        assert request is not None
        self.remove(request)
        if is_turn and request.client in self._by_client:
            self._by_client[request.client] = self._by_client.pop(request.client)

    def remove(self, request: S) -> None:
        """Take one out, wherever it waits."""
        if request in self._first:
            self._first.remove(request)
            return
        queue = self._by_client[request.client]
        queue.remove(request)
        if not queue:
            del self._by_client[request.client]

    def clear(self) -> None:
        """Take all out."""
        self._first.clear()
        self._by_client.clear()


class Scheduler(Generic[S]):
    """Holds the live requests, at most `slots`, and those that wait."""

    def __init__(self, slots: int, piece: int) -> None:
        self.slots, self.piece = slots, piece
        self.live: list[S] = []
        """In the order in which they joined; all of one rank."""
        self._queues: dict[Rank, WaitingQueue[S]] = {rank: WaitingQueue() for rank in Rank}
        self._turns: deque[S] = deque()
        """The live requests in the order in which their prompts run."""
        self._steps = 0
        """Steps with prompts."""

    @property
    def idle(self) -> bool:
        """Whether nothing is live and nothing waits."""
        return not self.live and self._first is None

    @property
    def waiting(self) -> list[S]:
        """Those that wait, by their ranks. Another thread may look too."""
        return [request for queue in self._queues.values() for request in queue]

    @property
    def requests(self) -> list[S]:
        """Those that are live, then those that wait."""
        return [*self.live, *self.waiting]

    def submit(self, request: S) -> None:
        """Let a request wait behind all others of its client and rank."""
        self._queues[request.rank].append(request)

    def submit_next(self, request: S) -> None:
        """Let a request wait before all others of its client and rank."""
        self._queues[request.rank].append_next(request)

    def replaced_by(self, request: S) -> list[S]:
        """Those whose place a request takes: each client has one prompt that is read ahead, the newest."""
        if request.rank is Rank.AHEAD:
            return [s for s in self.requests if s.rank is request.rank and s.client == request.client]
        return [*self._queues[Rank.AGAIN]][: 1 - MOST_AGAIN] if request.rank is Rank.AGAIN else []

    def next_to_join(self) -> S | None:
        """The request whose turn it is, if any waits, a slot is free, and none of an earlier rank is live."""
        first = self._first
        may_join = first is not None and len(self.live) < self.slots and all(s.rank == first.rank for s in self.live)
        return first if may_join else None

    def join(self) -> None:
        """Make the request whose turn it is a live one."""
        request = self._first
        assert request is not None
        self.live.append(request)  # first: whoever looks meanwhile finds it
        self._queues[request.rank].pop()
        self._turns.append(request)

    @property
    def has_to_yield(self) -> bool:
        """Whether a request waits before which the live ones have to wait."""
        first = self._first
        return first is not None and any(first.rank < s.rank for s in self.live)

    def preempt(self) -> S:
        """Let the request that joined last wait again, before all others of its rank."""
        request = self.live.pop()
        self._turns.remove(request)
        self._queues[request.rank].append_first(request)
        return request

    def remove(self, request: S) -> None:
        """Forget a request, live or waiting."""
        if request in self.live:
            self.live.remove(request)
            self._turns.remove(request)
        else:
            self._queues[request.rank].remove(request)

    def clear(self) -> list[S]:
        """Forget all requests; returns them."""
        found = self.requests
        self.live.clear()
        self._turns.clear()
        for queue in self._queues.values():
            queue.clear()
        return found

    @property
    def _first(self) -> S | None:
        """The request whose turn it is of all that wait."""
        return next((queue.head for queue in self._queues.values() if queue.head is not None), None)

    @property
    def decoding(self) -> int:
        """How many requests are decoding."""
        return sum(s.is_decoding for s in self.live)

    @property
    def reading(self) -> list[S]:
        """The requests whose prompts are being read, in the order of their turns."""
        return [s for s in self._turns if not s.is_decoding]

    def plan(self, prompt_tokens: int | None = None) -> list[tuple[S, int]]:
        """What runs in the next step, and how many tokens of each. Prompts that ran go behind the others.

        `prompt_tokens`: most tokens of prompts, None for a piece. More than a piece goes to one prompt alone: those
        that are read in one step share no work.
        """
        work = [(s, 1) for s in self.live if s.is_decoding]
        left, ran = self.piece if prompt_tokens is None else prompt_tokens, []
        reading = self.reading
        self._steps += bool(reading)
        if self._steps % BY_TURNS:
            reading.sort(key=lambda s: s.num_pending)
        for s in reading:
            if left > 0:
                tokens = min(s.block, left)
                work.append((s, tokens))
                left = min(left, self.piece) - tokens
                ran.append(s)
        for s in ran:
            self._turns.remove(s)
            self._turns.append(s)
        return work


class DecodeShare:
    """Says when prompts may run, so that those who are decoding keep a share s of their speed.

    A step with prompts takes T, one without t for each token of an answer: after it answers are owed s T − t of time.
    A step without prompts pays 1 − s of its time back. Prompts run while nothing is owed. No more than one step is paid
    in advance.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._plain_s: dict[int, float] = {}
        """Seconds of the latest step without prompts, by the number of requests in it."""
        self._owed_s = 0.0
        self._with_prompts = 0
        """Steps with prompts since the last one without."""

    def allows_prompts(self, decoding: int) -> bool:
        """Whether prompts may run beside so many answers."""
        if decoding == 0 or self._share == 0:
            return True
        return self._owed_s <= 0 and self._with_prompts < MAX_WITH_PROMPTS

    def count(self, seconds: float, decoding: int, prompts: bool, gained: float = 1.0) -> None:
        """Count a step: its time, the answers in it, whether it held prompts too, and the tokens that each gained."""
        self._with_prompts = self._with_prompts + 1 if prompts else 0
        if decoding == 0:
            self._owed_s = 0.0
            self._with_prompts = 0
        elif prompts:
            # Of fewer answers where that is all that is known: the shorter time is on the safe side.
            known = max((n for n in self._plain_s if n <= decoding), default=0)
            plain_s = self._plain_s.get(known, 0.0)
            self._owed_s = max(self._owed_s + self._share * seconds - plain_s, -plain_s)
        else:
            self._plain_s[decoding] = seconds / gained
            self._owed_s = max(self._owed_s - (1 - self._share) * seconds, -seconds)
