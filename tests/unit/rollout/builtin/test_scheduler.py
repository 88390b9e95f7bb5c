"""Scheduling without a model: a cache that records which text each slot stands for, and a coin for each token."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strop.ops.paged import PAGE
from strop.rollout.builtin.draw import Drawn
from strop.rollout.builtin.pages import PagePool, pages_for
from strop.rollout.builtin.rows import Request, Rows
from strop.rollout.builtin.scheduler import Plan, Scheduler
from strop.types import SamplingParams, Stop

LOOP = asyncio.new_event_loop()


def request(prompt: list[int], max_tokens: int, seed: int = 0, stops: tuple[int, ...] = (0,)) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=seed, stop_tokens=stops)
    return Request.new(np.array(prompt, np.int32), params, LOOP.create_future(), None)


class World:
    """A scheduler, and the texts that its cache slots stand for: a key of a token depends on all tokens up to it."""

    def __init__(self, num_rows: int, num_pages: int, prefill_tokens: int) -> None:
        self.rows = Rows(num_rows, num_pages * PAGE)
        self.scheduler = Scheduler(PagePool(num_pages), self.rows, prefill_tokens)
        self.slots: list[bytes | None] = [None] * (num_pages * PAGE)
        self.computed = 0  # tokens through the model
        self.steps = 0
        self.ended: list[Request] = []

    def text(self, row: int) -> np.ndarray:
        return self.rows._tokens_RW[row, : self.rows.length_R[row]]

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        assert len(set(plan.slot_T.tolist())) == len(plan.slot_T), "two tokens of one pass share a slot"
        columns = (plan.token_T, plan.position_T, plan.row_T, plan.slot_T)
        for token, position, row, slot in zip(*(column.tolist() for column in columns), strict=True):
            assert self.text(row)[position] == token
            self.slots[slot] = self.text(row)[: position + 1].tobytes()
        for position, row in zip(plan.position_T.tolist(), plan.row_T.tolist(), strict=True):
            self.check_sees_its_own_text(row, position + 1)
        for src, dst in plan.copies:
            self.slots[dst * PAGE : (dst + 1) * PAGE] = self.slots[src * PAGE : (src + 1) * PAGE]
        last = plan.last_M if plan.of_N is None else plan.last_M[plan.of_N]
        for n, row in enumerate(plan.row_N.tolist()):
            source = int(plan.row_T[last[n]])
            assert plan.position_T[last[n]] == self.rows.length_R[row] - 1
            assert self.text(source).tobytes() == self.text(row).tobytes(), "a twin draws from another text"
            self.check_sees_its_own_text(row, int(self.rows.length_R[row]))
        self.computed += len(plan.token_T)
        self.steps += 1
        if len(plan.row_N):
            self.draw(plan)
        return plan

    def check_sees_its_own_text(self, row: int, context: int) -> None:
        text, table = self.text(row), self.rows.tables_RB[row]
        for p in range(context):
            assert self.slots[table[p // PAGE] * PAGE + p % PAGE] == text[: p + 1].tobytes(), (row, p)

    def draw(self, plan: Plan) -> None:
        """Each token is a function of the request's own number, so a run can be compared with another."""
        tokens = (self.rows.next_uniforms(plan.row_N) * 20).astype(np.int64)
        nothing = np.zeros(len(tokens))
        self.rows.append(plan.row_N, Drawn(tokens_N=tokens, logprobs_N=nothing, sampling_logprobs_N=nothing), 0)
        ended = self.rows.hit_stop(plan.row_N, tokens) | self.rows.full(plan.row_N)
        self.ended += [self.scheduler.finish(row) for row in plan.row_N[ended].tolist()]

    def run(self) -> None:
        while self.scheduler.busy:
            self.step()


def replies(requests: list[Request]) -> list[list[int]]:
    return [r.completion(Stop.LENGTH).tokens.tolist() for r in requests]


def test_a_group_that_arrives_at_once_computes_its_prompt_once():
    world = World(num_rows=8, num_pages=32, prefill_tokens=64)
    group = [request(list(range(1, 38)), 1, seed) for seed in range(8)]
    for member in group:
        world.scheduler.add(member)
    plan = world.step()
    assert len(plan.token_T) == 37
    assert len(plan.last_M) == 1 and len(plan.row_N) == 8
    assert len(plan.copies) == 7  # the partly filled page
    assert world.ended == group


def test_two_groups_draw_from_their_own_prompts():
    """`step` checks that every twin's logits are those of its own text."""
    world = World(num_rows=8, num_pages=32, prefill_tokens=64)
    for seed in range(8):
        world.scheduler.add(request([1 + seed % 2] * 21, 3, seed))
    plan = world.step()
    assert len(plan.token_T) == 42
    assert len(plan.last_M) == 2 and len(plan.row_N) == 8
    world.run()


def test_a_known_prompt_of_whole_pages_still_computes_its_last_page():
    """The last token's hidden state draws the next one, and it is not in the cache."""
    world = World(num_rows=2, num_pages=16, prefill_tokens=64)
    for seed in range(2):
        world.scheduler.add(request([1] * 2 * PAGE, 1, seed))
        assert len(world.step().token_T) == (2 - seed) * PAGE
    assert len(world.ended) == 2


def test_pages_that_were_not_computed_again_are_not_known():
    """New weights, a long text computed again in parts, and cancelled half way: the rest of its pages hold nothing."""
    world = World(num_rows=2, num_pages=16, prefill_tokens=2 * PAGE)
    long = request([1] * 6 * PAGE, 4, stops=())
    world.scheduler.add(long)
    for _ in range(3):
        world.step()
    world.scheduler.interrupt_all()
    world.slots = [None] * len(world.slots)
    world.step()
    world.scheduler.drop(long)
    world.scheduler.add(request([1] * 6 * PAGE, 1))
    world.run()
    assert len(world.ended) == 1


def test_a_prompt_of_whole_pages_copies_nothing():
    world = World(num_rows=4, num_pages=16, prefill_tokens=64)
    for seed in range(4):
        world.scheduler.add(request(list(range(1, 2 * PAGE + 1)), 4, seed))
    assert world.step().copies == []
    world.run()


def test_members_that_arrive_later_share_full_pages():
    """While the first still runs, and after it has ended."""
    prompt = list(range(1, 2 * PAGE + 6))
    world = World(num_rows=4, num_pages=32, prefill_tokens=64)
    world.scheduler.add(request(prompt, 3, 1))
    assert len(world.step().token_T) == 37
    world.scheduler.add(request(prompt, 3, 2))
    assert len(world.step().token_T) == 5 + 1  # the rest after two pages, and the first one's next token
    world.run()
    world.scheduler.add(request(prompt, 3, 3))
    assert len(world.step().token_T) == 5


def test_a_conversation_goes_on_from_its_own_pages():
    """The second turn finds the pages that the first one filled while it drew."""
    world = World(num_rows=2, num_pages=16, prefill_tokens=256)
    world.scheduler.add(request([5] * 10, 40, stops=()))
    world.run()
    text = world.ended[0].text.tokens
    turn = [*text.tolist(), 3, 3, 3]
    known = (len(text) - 1) // PAGE * PAGE  # the last token was never computed
    assert known == 3 * PAGE
    world.scheduler.add(request(turn, 2))
    assert len(world.step().token_T) == len(turn) - known


def test_a_long_prompt_is_computed_in_parts_beside_the_others():
    world = World(num_rows=4, num_pages=64, prefill_tokens=20)
    world.scheduler.add(request([7], 30, stops=()))
    world.step()
    world.scheduler.add(request(list(range(1, 91)), 2))
    sizes = [len(world.step().token_T) for _ in range(5)]
    assert sizes == [21, 21, 21, 21, 11]
    world.run()
    assert len(world.ended) == 2


def test_the_queue_is_served_in_order_and_rows_are_reused():
    world = World(num_rows=2, num_pages=16, prefill_tokens=64)
    requests = [request([n + 1], 1) for n in range(9)]
    for each in requests:
        world.scheduler.add(each)
    world.run()
    assert world.ended == requests
    assert world.steps == 5


def test_when_pages_run_out_the_youngest_waits_and_nothing_changes():
    """The same requests with much room and with hardly any: same replies, and the small cache had to interrupt."""
    outcomes, computed = [], []
    for num_pages in (64, 5):
        world = World(num_rows=4, num_pages=num_pages, prefill_tokens=64)
        requests = [request([n + 1] * 8, 60, seed=n, stops=()) for n in range(4)]
        for each in requests:
            world.scheduler.add(each)
        world.run()
        outcomes.append(replies(requests))
        computed.append(world.computed)
        assert world.scheduler.pool.num_free == num_pages
    assert outcomes[0] == outcomes[1]
    assert computed[1] > computed[0]


def test_new_weights_send_everybody_back_in_order_and_nothing_old_is_found():
    """E14: after `interrupt_all` every text is computed again in full, prompt and sampled tokens."""
    world = World(num_rows=4, num_pages=32, prefill_tokens=256)
    requests = [request([n + 1] * 20, 50, seed=n, stops=()) for n in range(3)]
    for each in requests:
        world.scheduler.add(each)
    for _ in range(5):
        world.step()
    before = [world.rows.request(row) for row in world.scheduler._running]
    world.scheduler.interrupt_all()
    assert world.scheduler.num_running == 0
    world.slots = [None] * len(world.slots)
    plan = world.step()
    assert len(plan.token_T) == sum(len(r.text.tokens) for r in before)
    assert [world.rows.request(row) for row in world.scheduler._running] == before
    world.run()


def test_a_failed_step_loses_its_own_requests_and_keeps_those_that_wait():
    world = World(num_rows=2, num_pages=16, prefill_tokens=256)
    requests = [request([1] * 20, 5, seed=n) for n in range(4)]
    for each in requests:
        world.scheduler.add(each)
    world.scheduler.plan()  # and then the forward pass raises: what it should have written is not there
    assert world.scheduler.abandon() == requests[:2]
    assert world.scheduler.pool.num_free == 16
    world.run()
    assert world.ended == requests[2:]


LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 5)  # few, so that texts meet
actions_taken = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "step", "step", "step", "cancel", "update", "follow"]), st.integers(0, 10**6)
    ),
    max_size=40,
)


@given(actions_taken, st.integers(1, 5), st.integers(3, 12), st.integers(1, 40))
def test_every_token_always_sees_exactly_its_own_text(actions, num_rows, num_pages, prefill_tokens):
    """Requests of few distinct prompts come, are cancelled, continued, interrupted at random; all that remain end."""
    world = World(num_rows, num_pages, prefill_tokens)
    known: list[Request] = []
    cancelled: list[Request] = []
    room = num_pages * PAGE
    for action, number in actions:
        if action == "step" and world.scheduler.busy:
            world.step()
        elif action == "cancel" and known:
            victim = known[number % len(known)]
            if victim not in world.ended and victim not in cancelled:
                cancelled.append(victim)
            world.scheduler.drop(victim)
        elif action == "update":
            world.scheduler.interrupt_all()
            world.slots = [None] * len(world.slots)
        elif action in ("add", "follow"):
            prompt = [1 + number % 2] * min(LENGTHS[number // 2 % len(LENGTHS)], room - 1)
            if action == "follow" and world.ended:
                prompt = [*world.ended[number % len(world.ended)].text.tokens.tolist(), 4, 4][: room - 1]
            new = request(prompt, 1 + number // 7 % min(30, room - len(prompt)), seed=number)
            known.append(new)
            world.scheduler.add(new)
    world.run()
    assert {id(r) for r in world.ended} | {id(r) for r in cancelled} == {id(r) for r in known}
    assert world.scheduler.pool.num_free == num_pages
    assert world.rows.num_free == num_rows
    for each in world.ended:
        sampled = each.text.tokens[each.num_prompt :]
        assert len(sampled) == each.params.max_tokens or sampled[-1] == 0
        assert pages_for(len(each.text.tokens)) <= num_pages
