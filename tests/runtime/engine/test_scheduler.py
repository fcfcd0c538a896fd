"""What runs in a step, without a model: slots, pieces of prompts, turns, and who waits."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi_runtime.engine.scheduler import BY_TURNS, DecodeShare, Scheduler
from pi_runtime.sequence.sequence import Rank


@dataclass(eq=False)
class Numbers:
    """A sequence of nothing but numbers of tokens: a prompt, then an answer, drawn one by one."""

    name: str
    prompt: int
    answer: int
    client: str = ""
    kinds: tuple[int, ...] = ()
    """Positions at which a block ends."""
    rank: Rank = Rank.ASKED
    held: int = 0
    drawn: int = 0
    steps: list[int] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        return self.prompt + self.drawn - self.held

    @property
    def is_decoding(self) -> bool:
        return self.num_pending == 1

    @property
    def block(self) -> int:
        return min([end - self.held for end in self.kinds if end > self.held] + [self.num_pending])

    def run(self, tokens: int) -> bool:
        """Whether it has ended."""
        self.held += tokens
        self.steps.append(tokens)
        self.drawn += self.num_pending == 0
        return self.drawn == self.answer


def run(scheduler: Scheduler[Numbers]) -> list[list[tuple[str, int]]]:
    """Every step until nothing is left: who ran how many tokens."""
    steps = []
    while not scheduler.idle:
        while scheduler.next_to_join() is not None:
            scheduler.join()
        work = scheduler.plan()
        assert work
        steps.append([(s.name, tokens) for s, tokens in work])
        for s, tokens in work:
            if s.run(tokens):
                scheduler.remove(s)
    return steps


def scheduled(slots: int, piece: int, *sequences: Numbers) -> Scheduler[Numbers]:
    scheduler: Scheduler[Numbers] = Scheduler(slots, piece)
    for s in sequences:
        scheduler.submit(s)
    return scheduler


def test_a_prompt_comes_in_pieces_and_its_answer_one_by_one() -> None:
    assert run(scheduled(1, 4, Numbers("a", 10, 3))) == [[("a", n)] for n in (4, 4, 2, 1, 1)]


def test_an_answer_goes_on_beside_a_long_prompt() -> None:
    steps = run(scheduled(2, 4, Numbers("a", 1, 4), Numbers("b", 11, 1)))
    assert steps == [[("a", 1), ("b", 4)], [("a", 1), ("b", 4)], [("a", 1), ("b", 3)], [("a", 1)]]


def test_the_prompt_with_the_least_left_comes_first_and_now_and_then_one_by_turns() -> None:
    steps = run(scheduled(3, 8, Numbers("long", 80, 1), Numbers("other", 24, 1), Numbers("short", 3, 1)))
    assert steps[:4] == [[("short", 3), ("other", 5)], [("other", 8)], [("other", 8)], [("long", 8)]]
    assert [sum(tokens for _, tokens in step) for step in steps[:13]] == [8] * 13


def test_a_long_prompt_is_read_whatever_comes_beside_it() -> None:
    long = Numbers("long", 40, 1)
    scheduler = scheduled(2, 8, long)
    scheduler.join()
    for n in range(BY_TURNS * 10):
        scheduler.submit(Numbers(str(n), 8, 1))
        scheduler.join()
        for s, tokens in scheduler.plan():
            if s.run(tokens):
                scheduler.remove(s)
    assert long.drawn == 1


def test_more_than_a_piece_is_for_one_prompt_alone() -> None:
    """Two that begin alike share pages from one step to the next, and nothing within a step."""
    scheduler = scheduled(3, 8, Numbers("long", 60, 1), Numbers("other", 54, 1), Numbers("short", 43, 1))
    while scheduler.next_to_join():
        scheduler.join()
    for prompt_tokens, tokens in ((40, [40]), (4, [3, 1]), (40, [1, 40]), (0, [1])):
        work = scheduler.plan(prompt_tokens)
        assert [count for _, count in work] == tokens
        for s, count in work:
            s.run(count)


def test_a_block_of_one_kind_is_not_exceeded() -> None:
    again = Numbers("a", 6, 9, kinds=(6,), drawn=4)
    assert run(scheduled(1, 8, again))[:3] == [[("a", 6)], [("a", 4)], [("a", 1)]]


def test_others_wait_in_order() -> None:
    scheduler = scheduled(2, 8, *(Numbers(name, 1, 1) for name in "abc"))
    assert [[name for name, _ in step] for step in run(scheduler)] == [["a", "b"], ["c"]]


def test_clients_take_turns_and_the_requests_of_each_go_in_order() -> None:
    """One that comes late with one request waits for one of another's, and not for all of them."""
    many = [Numbers(f"a{n}", 1, 1, client="a") for n in range(5)]
    scheduler = scheduled(1, 8, *many, Numbers("b0", 1, 1, client="b"), Numbers("b1", 1, 1, client="b"))
    scheduler.submit(Numbers("c0", 1, 1, client="c"))
    joined = [name for ((name, _),) in run(scheduler)]
    assert joined == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]


def test_a_client_that_comes_again_waits_behind_the_others_of_its_round() -> None:
    a, b, again = Numbers("a", 1, 1, client="a"), Numbers("b", 1, 1, client="b"), Numbers("again", 1, 1, client="a")
    scheduler = scheduled(1, 8, a, b)
    scheduler.join()
    scheduler.submit(again)
    scheduler.remove(a)
    assert [name for ((name, _),) in run(scheduler)] == ["b", "again"]


def test_further_answers_wait_before_all_of_their_client_and_of_no_other() -> None:
    scheduler = scheduled(1, 8, *(Numbers(name, 1, 1, client=name[0]) for name in ("a0", "b0", "a1")))
    scheduler.submit_next(Numbers("b-", 1, 1, client="b"))
    assert [name for ((name, _),) in run(scheduler)] == ["a0", "b-", "a1", "b0"]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(Rank), st.integers(0, 9)), min_size=1, max_size=20), st.integers(1, 4))
def test_a_later_rank_runs_only_where_no_earlier_one_waits_or_is_live(
    comes: list[tuple[Rank, int]], slots: int
) -> None:
    """Each comes so many steps after the one before; all that yield wait again, and end at last."""
    scheduler: Scheduler[Numbers] = Scheduler(slots, 4)
    coming = [(Numbers(str(n), 9, 1, client=str(n), rank=rank), after) for n, (rank, after) in enumerate(comes)]
    left, pause = [s for s, _ in coming], 0
    while coming or not scheduler.idle:
        while coming and coming[0][1] <= pause:
            scheduler.submit(coming.pop(0)[0])
            pause = 0
        pause += 1
        while scheduler.has_to_yield:
            scheduler.preempt()
        while scheduler.next_to_join() is not None:
            scheduler.join()
        first = min((s.rank for s in scheduler.requests), default=None)
        assert all(s.rank is first for s in scheduler.live)
        assert len(scheduler.live) == min(slots, sum(s.rank is first for s in scheduler.requests))
        for s, tokens in scheduler.plan():
            if s.run(tokens):
                scheduler.remove(s)
                left.remove(s)
    assert not left


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 4))
def test_nobody_waits_for_more_than_one_request_of_each_other_client(clients: list[int], slots: int) -> None:
    sequences = [Numbers(f"{client} {n}", 1, 1, client=str(client)) for n, client in enumerate(clients)]
    scheduler = scheduled(slots, 8, *sequences)
    order = [name.split()[0] for step in run(scheduler) for name, _ in step]
    for client in set(order):
        own = [n for n, name in enumerate(order) if name == client]
        for before, after in zip([-1, *own], own, strict=False):
            between = order[before + 1 : after]
            assert len(between) == len(set(between))


def test_who_joined_last_waits_before_all_others() -> None:
    a, b, c, d = (Numbers(name, 5, 1) for name in "abcd")
    scheduler = scheduled(3, 8, a, b, c, d)
    while scheduler.next_to_join():
        scheduler.join()
    assert [scheduler.preempt(), scheduler.preempt()] == [c, b]
    assert (scheduler.live, list(scheduler.waiting)) == ([a], [b, c, d])
    assert scheduler.next_to_join() is b
    scheduler.remove(c)
    assert scheduler.clear() == [a, b, d]
    assert scheduler.idle


@settings(deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 70),
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 30)), min_size=1, max_size=20),
)
def test_no_step_holds_more_than_a_piece_and_all_end(slots: int, piece: int, sizes: list[tuple[int, int]]) -> None:
    sequences = [Numbers(str(n), *size) for n, size in enumerate(sizes)]
    prompts = {s.name: s.prompt for s in sequences}
    begun: dict[str, int] = dict.fromkeys(prompts, 0)
    for step in run(scheduled(slots, piece, *sequences)):
        assert len(step) <= slots
        assert len({name for name, _ in step}) == len(step)
        of_prompts = 0
        for name, tokens in step:
            of_prompts += tokens if prompts[name] - begun[name] > 1 else 0
            begun[name] += tokens
        assert of_prompts <= piece
    assert all(s.drawn == s.answer and sum(s.steps) == s.prompt + s.answer - 1 for s in sequences)


@pytest.mark.parametrize("others", [1, 5])
def test_a_short_prompt_beside_long_ones_is_served_at_once(others: int) -> None:
    long = [Numbers(f"long {n}", 1000, 1) for n in range(others)]
    short = Numbers("short", 10, 1)
    steps = run(scheduled(8, 16, *long, short))
    assert any(name == "short" for name, _ in steps[0])


@settings(deadline=None)
@given(st.floats(0.1, 0.8), st.floats(0.001, 0.1), st.floats(0, 1))
def test_answers_keep_their_share_and_prompts_the_rest(share: float, plain_s: float, piece_s: float) -> None:
    """Of the time of a long prompt, up to one cycle at its end."""
    rule = DecodeShare(share)
    elapsed = steps = pieces = 0.0
    for _ in range(2000):
        prompts = rule.allows_prompts(3)
        seconds = plain_s + piece_s * prompts
        rule.count(seconds, 3, prompts)
        elapsed, steps, pieces = elapsed + seconds, steps + 1, pieces + prompts
    cycle = piece_s / (1 - share) / share + 2 * plain_s
    assert steps * plain_s >= share * elapsed - cycle
    assert pieces * piece_s >= min((1 - share) * elapsed, 0.88 * 2000 * piece_s) - cycle


def test_the_share_is_one_of_tokens_where_guesses_gain_several() -> None:
    rule, elapsed, tokens = DecodeShare(0.5), 0.0, 0
    for _ in range(1000):
        prompts = rule.allows_prompts(1)
        rule.count(1.0 + prompts, 1, prompts, 1 if prompts else 4)
        elapsed, tokens = elapsed + 1 + prompts, tokens + (1 if prompts else 4)
    assert tokens / elapsed == pytest.approx(0.5 * 4, rel=0.02)


def test_a_slow_step_is_forgotten() -> None:
    """Otherwise its time would count for all that follow, and answers get less than their share."""
    rule, plain, pieces = DecodeShare(0.5), 0, 0
    rule.count(100.0, 1, False)
    for _ in range(1000):
        prompts = rule.allows_prompts(1)
        rule.count(1.0 + 9.0 * prompts, 1, prompts)
        plain, pieces = plain + (not prompts), pieces + prompts
    assert (plain + pieces) / (plain + 10 * pieces) > 0.4


def test_without_a_share_prompts_always_run() -> None:
    rule = DecodeShare(0)
    for seconds in (1.0, 0.1, 3.0):
        assert rule.allows_prompts(2)
        rule.count(seconds, 2, True)


def test_prompts_alone_owe_nothing() -> None:
    rule = DecodeShare(0.5)
    rule.count(1, 2, True)
    assert not rule.allows_prompts(2)
    assert rule.allows_prompts(0)
    rule.count(1, 0, True)
    assert rule.allows_prompts(2)
