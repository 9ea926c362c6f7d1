"""Static batching: the baseline that continuous batching is measured against, with everything else equal."""

from __future__ import annotations

from batcher.scheduling.request_state import RequestState, State
from batcher.scheduling.scheduler import Scheduler, Verdict
from batcher.scheduling.step_plan import StepPlan


class StaticScheduler(Scheduler):
    """Takes as many waiting requests as fit, computes all their prompts, then decodes until the longest has ended.

    No request joins or leaves meanwhile. As in a padded batch, the row of a request that has ended keeps decoding: its
    K/V grows, and its tokens are dropped. Such a row stops when its context is full or its output is as long as the
    batch's longest, and it stays in the padded shape even then. Pages are reserved as if every output were as long as
    the longest one, so no request is ever preempted. Prompts are chunked and found in the prefix cache as in continuous
    scheduling, and are not padded to the longest prompt. Both favour this baseline.
    """

    _states_of_running = (State.RUNNING, State.FINISHED)
    _batch_rows = 0

    def finish(self, sequence: RequestState) -> None:
        """Ends the request. Its row, slot and pages stay with the batch until the batch's last request ends."""
        if sequence.state is not State.RUNNING:
            super().finish(sequence)
            return
        self.commit(sequence)
        self.columns.leave(sequence)
        sequence.state = State.FINISHED
        if all(seq.state is State.FINISHED for seq in self.running):
            self._let_go()

    def schedule(self) -> StepPlan | None:
        admitted: list[RequestState] = []
        if not self.running:
            if self._held:
                return None  # the previous batch still has rows in flight
            for adapter in self.adapters.to_look_at_again():
                self.waiting.put_back(adapter)
            while seq := self.waiting.first():
                verdict = self._admit(seq, set())
                if verdict is Verdict.NO_ADAPTER:
                    self.waiting.set_aside(seq, seq.request.adapter)
                elif verdict is Verdict.ADMITTED:
                    admitted.append(seq)
                else:
                    break
            self._batch_rows = len(admitted)
        chunks: list[tuple[RequestState, int]] = []
        budget = self.token_budget
        for seq in self.running:
            if seq.state is State.RUNNING and not seq.decoding and not seq.is_blocked and budget:
                chunks.append((seq, min(len(seq.to_compute) - seq.num_computed, budget)))
                budget -= chunks[-1][1]
        if chunks:
            return self._padded(self._plan_ones([], chunks, admitted, []))
        longest = max((seq.limit for seq in self.running), default=0)
        decodes = [
            seq
            for seq in self.running
            if seq.decoding and not seq.is_blocked and seq.num_computed < self._num_stored(seq, longest)
        ]
        num_wanted = sum(seq.state is State.RUNNING and seq.num_emitted < seq.limit for seq in decodes)
        if not num_wanted:
            return None
        grown = [self._grow(seq) for seq in decodes if seq.num_computed == len(seq.pages) * self.page_size]
        plan = self._padded(self._plan_ones(decodes, [], admitted, grown))
        plan.num_ended = len(decodes) - num_wanted
        return plan

    def recover(self) -> None:
        self._let_go(ended_only=True)
        super().recover()

    def check_integrity(self) -> None:
        super().check_integrity()
        assert not self.running or any(seq.state is State.RUNNING for seq in self.running), "a batch outlives its end"

    def _let_go(self, *, ended_only: bool = False) -> None:
        for seq in list(self.running):
            if not ended_only or seq.state is State.FINISHED:
                self._leave(seq)

    def _has_room(self, seq: RequestState, num_new: int, num_revived: int) -> bool:
        """Whether the whole pool suffices for the batch with `seq`, until the batch ends."""
        batch = [*self.running, seq]
        longest = max(s.limit for s in batch)
        return sum(-(-self._num_stored(s, longest) // self.page_size) for s in batch) <= self.pool.num_pages

    def _num_stored(self, seq: RequestState, longest: int) -> int:
        """Tokens in the row's pages at the end of a batch whose longest output has `longest` tokens. The last token
        that a row draws is not stored. An embedded prompt may fill the context."""
        return max(seq.num_prompt, min(seq.num_prompt + longest, self.max_model_len) - 1)

    def _padded(self, plan: StepPlan) -> StepPlan:
        """The plan, with the whole batch's rows if all of them bring one token."""
        rows, own = self._batch_rows, plan.bucket
        if plan.num_singles == len(plan.rows):
            plan.bucket = self.ladder.choose(
                rows, rows, decode_only=True, variant=own.variant, has_adapters=own.has_adapters
            )
        return plan
