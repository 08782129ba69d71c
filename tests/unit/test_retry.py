"""The retry budget: by example, through random histories, and driven as the proxy drives it."""

import itertools
import random
from collections.abc import Iterable, Sequence
from math import inf, nextafter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lb.errors import (
    AttemptError,
    BadResponse,
    ConnectFailed,
    LostBeforeResponse,
    StaleConnection,
    TimedOut,
)
from lb.retry import MAX_SENDS, RetryBudget, RetryPolicy, is_safe_to_resend
from lb.settings import RetryMode

REFUSED = ConnectFailed("connect_refused", "a: it refuses connections")
STALE = StaleConnection("a: closed")
LOST = LostBeforeResponse("a: closed")
BAD = BadResponse("protocol", "a: no HTTP")
LATE = TimedOut("no answer")
MODES: list[RetryMode] = ["before-response", "safe"]


class Longest(random.Random):
    """Jitter that takes nothing off."""

    def uniform(self, a: float, b: float) -> float:
        return b


def budget_of(
    *,
    mode: RetryMode = "before-response",
    total_timeout: float = 285.0,
    no_replica_wait: float = 10.0,
    jitter: random.Random | None = None,
) -> RetryBudget:
    """The budget of a request that arrived at 0 s."""
    policy = RetryPolicy(mode, total_timeout, no_replica_wait)
    return RetryBudget(policy, 0.0, jitter or Longest())


# --- may it be sent again? ----------------------------------------------------------------------


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("error", [REFUSED, STALE], ids=["refused", "stale"])
def test_what_no_replica_can_have_acted_on_is_always_resent(
    error: AttemptError, mode: RetryMode, safe: bool
) -> None:
    budget = budget_of(mode=mode)
    for now in range(3 * MAX_SENDS):
        budget.sent(now)
        assert budget.may_resend(error, safe=safe, body_complete=True)


@pytest.mark.parametrize(
    ("mode", "safe", "allowed"),
    [
        ("before-response", True, True),
        ("before-response", False, True),
        ("safe", True, True),
        ("safe", False, False),
    ],
)
def test_what_was_sent_and_lost_is_resent_as_the_mode_says(
    mode: RetryMode, safe: bool, allowed: bool
) -> None:
    budget = budget_of(mode=mode)
    budget.sent(0.0)
    assert budget.may_resend(LOST, safe=safe, body_complete=True) is allowed


@pytest.mark.parametrize("mode", MODES)
def test_what_was_lost_three_times_is_not_sent_a_fourth_time(mode: RetryMode) -> None:
    budget = budget_of(mode=mode)
    verdicts = []
    for now in range(4):
        budget.sent(now)
        verdicts.append(budget.may_resend(LOST, safe=True, body_complete=True))
    assert verdicts == [True, True, False, False]


@pytest.mark.parametrize("error", [BAD, LATE], ids=["bad answer", "late"])
def test_what_saw_a_part_of_an_answer_or_the_wall_is_never_resent(error: AttemptError) -> None:
    assert not budget_of().may_resend(error, safe=True, body_complete=True)


@pytest.mark.parametrize("error", [REFUSED, STALE, LOST], ids=["refused", "stale", "lost"])
def test_without_its_whole_body_nothing_is_resent(error: AttemptError) -> None:
    assert not budget_of().may_resend(error, safe=True, body_complete=False)


@pytest.mark.parametrize(
    ("method", "names", "safe"),
    [
        *[(m, [], True) for m in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE")],
        *[(m, [b"content-type"], False) for m in ("POST", "PATCH", "CONNECT", "get", "PROPFIND")],
        ("POST", [b"accept", b"idempotency-key"], True),
        ("POST", [b"x-idempotency-key", b"idempotency-keys"], False),
    ],
)
def test_what_is_safe_to_resend(method: str, names: Sequence[bytes], safe: bool) -> None:
    assert is_safe_to_resend(method, names) is safe


# --- the wait -----------------------------------------------------------------------------------


def test_the_wait_starts_when_it_is_first_asked_for() -> None:
    budget = budget_of(no_replica_wait=10.0)
    assert budget.wait_left(100.0) == 10.0
    assert budget.wait_left(104.0) == 6.0
    assert budget.wait_left(110.0) == 0.0


def test_the_wait_is_interrupted_by_a_send_and_goes_on_after_it() -> None:
    budget = budget_of(no_replica_wait=10.0)
    budget.wait_left(1.0)
    budget.sent(4.0)  # 3 s are spent
    assert budget.wait_left(50.0) == 7.0
    budget.sent(55.0)  # 8 s are
    budget.sent(60.0)
    assert budget.wait_left(60.0) == 2.0
    assert budget.wait_left(62.0) == 0.0


def test_the_wait_ends_at_the_wall() -> None:
    budget = budget_of(total_timeout=285.0, no_replica_wait=10.0)
    assert budget.wall == 285.0
    assert budget.wait_left(280.0) == 5.0
    assert budget.wait_left(285.0) == 0.0
    assert budget.wait_left(286.0) < 0.0


def test_a_wait_of_0_is_none() -> None:
    assert budget_of(no_replica_wait=0.0).wait_left(0.0) == 0.0


# --- the pauses ---------------------------------------------------------------------------------


def test_the_pauses_double_up_to_1_s_and_start_anew_after_a_send() -> None:
    budget = budget_of()
    assert [budget.pause() for _ in range(7)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    budget.sent(5.0)
    assert [budget.pause() for _ in range(2)] == [0.05, 0.1]


def test_the_pauses_stay_at_1_s_however_many_there_are() -> None:
    budget = budget_of()
    assert {budget.pause() for _ in range(2_000)} == {0.05, 0.1, 0.2, 0.4, 0.8, 1.0}


def test_the_pauses_are_jittered_by_up_to_a_half() -> None:
    firsts = {budget_of(jitter=random.Random(seed)).pause() for seed in range(50)}
    assert len(firsts) > 40
    assert 0.025 <= min(firsts) < 0.03
    assert 0.045 < max(firsts) <= 0.05


# --- random histories ---------------------------------------------------------------------------


class BudgetMachine(RuleBasedStateMachine):
    """Any history; who waits does so for no longer than told."""

    # Times are sums of powers of two, so that the floats of both sides are exact.
    @initialize(
        mode=st.sampled_from(MODES),
        total_timeout=st.sampled_from([4.0, 16.0, 256.0]),
        no_replica_wait=st.sampled_from([0.0, 1.0, 8.0]),
    )
    def arrive(self, mode: RetryMode, total_timeout: float, no_replica_wait: float) -> None:
        self.now = self.arrived = 64.0
        self.mode, self.total_timeout, self.no_replica_wait = mode, total_timeout, no_replica_wait
        policy = RetryPolicy(mode, total_timeout, no_replica_wait)
        self.budget = RetryBudget(policy, self.now, random.Random(0))
        self.sends = self.pauses = 0
        self.waited = 0.0
        self.waiting_since: float | None = None

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0, 128.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(share=st.sampled_from([0.5, 1.0]))
    def nobody_can_be_asked(self, share: float) -> None:
        left = self.budget.wait_left(self.now)
        if self.waiting_since is None:
            self.waiting_since = self.now
        waited = self.waited + self.now - self.waiting_since
        wall = self.arrived + self.total_timeout
        assert left == min(self.no_replica_wait - waited, wall - self.now)
        if left > 0:
            self.now += left * share
            assert self.now <= wall
            assert waited + left * share <= self.no_replica_wait

    @rule()
    def a_replica_is_sent_the_request(self) -> None:
        self.budget.sent(self.now)
        self.sends += 1
        self.pauses = 0
        if self.waiting_since is not None:
            self.waited += self.now - self.waiting_since
        self.waiting_since = None

    @rule()
    def all_were_tried(self) -> None:
        pause = self.budget.pause()
        longest = min([0.05, 0.1, 0.2, 0.4, 0.8, 1.0][min(self.pauses, 5)], 1.0)
        assert longest / 2 <= pause <= longest
        self.pauses += 1

    @rule(
        error=st.sampled_from([REFUSED, STALE, LOST, BAD, LATE]),
        safe=st.booleans(),
        body_complete=st.booleans(),
    )
    def an_attempt_fails(self, error: AttemptError, safe: bool, body_complete: bool) -> None:
        allowed = {
            REFUSED: True,
            STALE: True,
            LOST: (self.mode == "before-response" or safe) and self.sends < 3,
            BAD: False,
            LATE: False,
        }[error]
        verdict = self.budget.may_resend(error, safe=safe, body_complete=body_complete)
        assert verdict == (allowed and body_complete)

    @invariant()
    def the_wall_does_not_move(self) -> None:
        assert self.budget.wall == self.arrived + self.total_timeout


# Hypothesis looks for the shortest history that fails for up to 300 s.
TestBudget = pytest.mark.timeout(400)(BudgetMachine.TestCase)


# --- as the proxy drives it ---------------------------------------------------------------------


@given(
    outcomes=st.lists(
        st.tuples(st.sampled_from([REFUSED, STALE, LOST, None]), st.floats(0, 3)),
        min_size=1,
        max_size=8,
    ),
    replicas=st.integers(1, 3),
    mode=st.sampled_from(MODES),
    total_timeout=st.floats(0.1, 30),
    no_replica_wait=st.floats(0, 10),
    randomness=st.randoms(use_true_random=False),
)
@example(
    outcomes=[(REFUSED, 0.0025), (None, 0.0), (REFUSED, 0.0)],
    replicas=1,
    mode="before-response",
    total_timeout=1.0,
    no_replica_wait=0.5,
    randomness=random.Random(1),
)
def test_every_request_ends_by_its_wall_and_its_wait(
    outcomes: Iterable[tuple[AttemptError | None, float]],
    replicas: int,
    mode: RetryMode,
    total_timeout: float,
    no_replica_wait: float,
    randomness: random.Random,
) -> None:
    """Replicas that refuse, drop and vanish in turn, for ever; None is a time without any."""
    budget = budget_of(
        mode=mode,
        total_timeout=total_timeout,
        no_replica_wait=no_replica_wait,
        jitter=random.Random(randomness.random()),
    )
    now = waited = 0.0
    tried = lost = 0
    stale = False
    for step, (outcome, seconds) in enumerate(itertools.cycle(outcomes)):
        assert step < 100_000, "it goes on for ever"
        if outcome is None or tried == replicas:
            left = budget.wait_left(now)
            if left <= 0:
                break
            pause = min(left, budget.pause())
            # A clock goes on, even where what is left is too little to change the sum.
            now, waited, tried = max(now + pause, nextafter(now, inf)), waited + pause, 0
            continue
        error = LOST if stale and outcome is STALE else outcome  # a fresh connection is not stale
        if error is not REFUSED:
            budget.sent(now)
        now = min(now + seconds, budget.wall)
        if now == budget.wall:
            break  # the running attempt met the wall
        lost += error is LOST
        if not budget.may_resend(error, safe=False, body_complete=True):
            break
        stale = error is STALE
        tried += not stale
    rounding = 1e-6
    assert now <= total_timeout + rounding
    assert waited <= no_replica_wait + rounding
    assert lost <= (MAX_SENDS if mode == "before-response" else 1)
