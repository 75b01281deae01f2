"""Whatever happens to a scheduler, in whatever order: see Witness for what is asserted after every call."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from witness import Witness

from orca_backend.config import POLICIES
from orca_backend.scheduler.scheduler import Rejected

STOP = 0  # the token that ends requests which ask for it

ORDERS = [None, None, "priority", "shortest", "deadline", "fair"]


class AnythingHappens(RuleBasedStateMachine):
    """Random arrivals, lengths, wishes, cancels, failed rows and failed iterations, and time that passes."""

    policy = "orca"

    @initialize(
        max_bs=st.integers(1, 4),
        n_workers=st.integers(1, 3),
        block_size=st.sampled_from([1, 4, 16]),
        n_slots=st.integers(16, 80),
        max_model_len=st.integers(20, 60),
        order=st.sampled_from(ORDERS),
        swap_slots=st.sampled_from([0, 0, 16, 80]),
        prefix_cache=st.booleans(),
        token_budget=st.integers(4, 20),
        max_queue_seconds=st.sampled_from([None, 3.0]),
    )
    def start(
        self,
        n_workers: int,
        max_model_len: int,
        swap_slots: int,
        prefix_cache: bool,
        token_budget: int,
        **options: Any,
    ) -> None:
        parts = POLICIES[self.policy]
        if parts.preemption != "none" and swap_slots:
            options |= {"preemption": "swap", "swap_slots": swap_slots}
        if parts.selection == "token_budget":
            options["token_budget"] = token_budget
        self.max_model_len = max_model_len
        self.accepted: list[int] = []
        self.submitted = 0
        self.witness = Witness(
            self.policy,
            n_workers=1 if parts.admission == "peak" else n_workers,
            max_model_len=max_model_len,
            prefix_cache=prefix_cache and not parts.selection.startswith("static"),
            **options,
        )

    @rule(
        prompt=st.integers(1, 30),
        generate=st.integers(1, 20),
        stops=st.booleans(),
        shared=st.sampled_from([0, 8, 30]),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(["", "a"]),
        seconds=st.sampled_from([None, None, 0.5, 5.0]),
        expected=st.sampled_from([None, 1, 7]),
    )
    def submit(
        self,
        prompt: int,
        generate: int,
        stops: bool,
        shared: int,
        priority: int,
        tenant: str,
        seconds: float | None,
        expected: int | None,
    ) -> None:
        self.submitted += 1
        whole_blocks = -(-(prompt + generate) // self.witness.block_size)
        possible = prompt + generate <= self.max_model_len and whole_blocks <= self.witness.n_blocks
        try:
            self.witness.submit(
                self.submitted,
                prompt,
                generate,
                [STOP] if stops else [],
                shared=shared,
                priority=priority,
                tenant=tenant,
                deadline=None if seconds is None else self.witness.now + seconds,
                expected_tokens=expected,
            )
            assert possible
            self.accepted.append(self.submitted)
        except Rejected:
            assert not possible

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.witness.cancel(data.draw(st.sampled_from(self.accepted)))

    @rule(seconds=st.floats(0.01, 2))
    def wait(self, seconds: float) -> None:
        self.witness.wait(seconds)

    @rule()
    def schedule(self) -> None:
        self.witness.schedule()

    @precondition(lambda self: self.witness.in_flight)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        rows = self.witness.in_flight[0][0].rows
        tokens = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
        self.witness.complete(tokens)

    @precondition(lambda self: self.witness.in_flight)
    @rule(data=st.data())
    def fail_rows(self, data: st.DataObject) -> None:
        ids = [row.request_id for row in self.witness.in_flight[0][0].rows]
        self.witness.complete(failed=tuple(data.draw(st.sets(st.sampled_from(ids), min_size=1))))

    @precondition(lambda self: self.witness.in_flight)
    @rule()
    def lose_iteration(self) -> None:
        self.witness.lose()

    @rule(times=st.integers(1, 8))
    def run(self, times: int) -> None:
        for _ in range(times):
            if self.witness.scheduler.has_work:
                self.witness.step()

    def teardown(self) -> None:
        if hasattr(self, "witness"):
            self.witness.drain()
            ended = [event.request_id for event in self.witness.events if event.finish_reason is not None]
            assert sorted(ended) == self.accepted


@pytest.mark.parametrize("policy", POLICIES)
def test_invariants(policy: str) -> None:
    machine = type("AnythingHappens", (AnythingHappens,), {"policy": policy})
    limits = settings(
        max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    run_state_machine_as_test(machine, settings=limits)
