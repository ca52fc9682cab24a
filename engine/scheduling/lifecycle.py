"""The moves of a sequence: waiting -> running (-> waiting again, if preempted) -> ended.

Sequences change their state nowhere else. Each move keeps blocks, seats, slot references, counters
and quotas consistent. What to move is decided elsewhere, by policies and admission.
"""

import math
from collections.abc import Sequence as SequenceOf

from engine.config import SchedulerConfig
from engine.scheduling.adapter_queue import AdapterQueue
from engine.scheduling.adapter_slots import AdapterSlots
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.prefix_hash import cache_seed, extend_hashes
from engine.scheduling.request import Request
from engine.scheduling.running import Running
from engine.scheduling.sequence import Sequence, SequenceState
from engine.scheduling.slot_gate import SlotGate
from engine.scheduling.slot_victims import SlotVictims
from engine.scheduling.step_clock import StepClock
from engine.scheduling.tenant import Tenant, charge
from engine.scheduling.waiting import Waiting
from engine.telemetry.observer import Observer


class Lifecycle:
    """Owns what sequences hold, and moves them."""

    def __init__(
        self, config: SchedulerConfig, time: StepClock, observer: Observer | None = None
    ) -> None:
        self.blocks = BlockManager(config.num_kv_blocks, config.block_size)
        self.slots = AdapterSlots(config.max_loras, observer)
        self.waiting = Waiting(self.slots, time)
        self.running = Running()
        # A static batch is never cut short. It rewrites computed positions (its padding), so its
        # blocks must not be shared.
        is_static = config.policy == "static"
        debt_limit = math.inf if is_static else config.slot_debt_limit
        victims = SlotVictims(self.slots, self.waiting, self.running)
        self.gate = SlotGate(self.slots, self.waiting, debt_limit, victims)
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        """Of all requests admitted so far; of these, `num_cached_tokens` were not computed."""
        self.num_cached_tokens = 0
        self._max_num_seqs = config.max_num_seqs
        self._has_prefix_cache = config.enable_prefix_cache and not is_static
        self._time = time
        self._observer = observer
        self._num_sequences = 0

    def arrive(self, request: Request) -> None:
        """Queue a new request as one sequence that stands for all its choices."""
        choices = tuple(range(request.message.sampling.n))
        sequence = self._new_sequence(request, choices, list(request.message.prompt_token_ids))
        self.waiting.push(sequence)
        self._apply_quota(request.queue.tenant)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether seats and blocks for its whole length + 1 are free, sharing no cached blocks."""
        num_blocks = self.blocks.blocks_for(len(sequence.token_ids) + 1)
        has_seats = self.running.num_seats + sequence.num_seats <= self._max_num_seqs
        return has_seats and self.blocks.can_allocate(num_blocks)

    def find_cached(self, sequence: Sequence) -> list[int]:
        """Published blocks that a waiting sequence could share.

        They leave at least one token to compute, outside of the shared blocks: a prompt that is
        cached in full does not share its last block.
        """
        if not self._has_prefix_cache:
            return []
        num_blocks = (len(sequence.token_ids) - 1) // self.blocks.block_size
        self._extend_hashes(sequence, num_blocks)
        return self.blocks.match(sequence.block_hashes[:num_blocks])

    def admit(self, sequence: Sequence, cached: SequenceOf[int]) -> None:
        """waiting -> running: take blocks for the whole length, sharing those in `cached`.

        The tokens to compute are charged on the first admission only.
        """
        request = sequence.request
        self.waiting.take(sequence)
        sequence.is_resuming = False
        request.has_untold_wait = True
        self.gate.release(request.queue)
        num_blocks = self.blocks.blocks_for(len(sequence.token_ids))
        sequence.block_table = self.blocks.allocate(num_blocks, cached)
        sequence.num_computed = len(cached) * self.blocks.block_size
        sequence.num_published = len(cached)
        sequence.prefill_length = len(sequence.token_ids)
        self._start(sequence)
        if self._observer is not None:
            self._observer.admitted(request, self._time.now)
        request.is_decoding = False
        request.note_change("prefill", self._time.now)
        if request.first_admitted is None:
            request.first_admitted = self._time.now
            request.num_cached_tokens = sequence.num_computed
            self.num_prompt_tokens += len(sequence.token_ids)
            self.num_cached_tokens += sequence.num_computed
            self.charge(request.queue, sequence.num_uncomputed)
        self._apply_quota(request.queue.tenant)

    def preempt(self, sequence: Sequence, *, for_blocks: bool = False) -> None:
        """running -> waiting: give up blocks and slot, keep the output, go first in the queue.

        A sequence that is preempted for its blocks resumes before anybody new is admitted. If it
        did not, the many less served tenants would take its blocks in the middle of its stream. One
        that is preempted for its slot has to earn a slot like others.
        """
        assert not sequence.finished
        sequence.is_resuming = for_blocks
        self._stop(sequence)
        self._wait_again(sequence)
        self._settle(sequence.request.queue)

    def num_lost_blocks(self, sequence: Sequence) -> int:
        """Full blocks that would have to be computed again if the sequence were preempted."""
        return sequence.num_computed // self.blocks.block_size - sequence.num_published

    def fork(self, parent: Sequence) -> list[Sequence]:
        """Split a sequence at the end of its shared prefill; returns the new sequences.

        The parent keeps its first choice. Each other choice gets a sequence of its own over the
        same blocks, or starts as preempted if there is no block for its partial one.
        """
        others = parent.choices[1:]
        self.running.keep_one_seat(parent)
        children = [self._fork_one(parent, choice) for choice in others]
        self._apply_quota(parent.request.queue.tenant)
        return children

    def end(self, sequence: Sequence) -> None:
        """waiting or running -> ended. A request is over when it has no sequences left."""
        request = sequence.request
        if sequence.is_running:
            self._stop(sequence)
        else:
            self.waiting.take(sequence)
        sequence.state = SequenceState.ENDED
        request.sequences.remove(sequence)
        if request.message.adapter is not None:
            self.slots.unwant(request.message.adapter)
        self._settle(request.queue)
        self.waiting.rest(request.queue)

    def charge(self, queue: AdapterQueue, num_tokens: float) -> None:
        """Charge service to the counters, and to the debt towards those who wait for a slot."""
        charge(queue, num_tokens)
        self.gate.lend(queue.tenant, num_tokens)

    def publish(self, sequence: Sequence) -> None:
        """Let the prefix cache find the full blocks that a sequence has computed."""
        num_full = sequence.num_computed // self.blocks.block_size
        if not self._has_prefix_cache or num_full == sequence.num_published:
            return
        self._extend_hashes(sequence, num_full)
        for index in range(sequence.num_published, num_full):
            self.blocks.publish(
                sequence.block_table[index],
                sequence.block_hashes[index],
                sequence.request.message.adapter,
            )
        sequence.num_published = num_full

    def hold(self, tenant: Tenant) -> None:
        """Hold a tenant back: its limit lets no more of its sequences run."""
        self.waiting.hold(tenant)
        self.gate.release_tenant(tenant)

    def _fork_one(self, parent: Sequence, choice: int) -> Sequence:
        child = self._new_sequence(parent.request, (choice,), list(parent.token_ids))
        table = self.blocks.fork(parent.block_table, parent.num_computed)
        if table is None:
            child.is_resuming = True
            self._wait_again(child)
            return child
        child.block_table = table
        child.num_computed = child.prefill_length = parent.num_computed
        child.block_hashes = list(parent.block_hashes)
        child.num_published = parent.num_published
        self._start(child)
        return child

    def _new_sequence(
        self, request: Request, choices: tuple[int, ...], token_ids: list[int]
    ) -> Sequence:
        self._num_sequences += 1
        sequence = Sequence(self._num_sequences, request, choices, token_ids)
        request.sequences.append(sequence)
        if request.message.adapter is not None:
            self.slots.want(request.message.adapter)
        return sequence

    def _start(self, sequence: Sequence) -> None:
        adapter = sequence.request.message.adapter
        if adapter is not None:
            sequence.slot = self.slots.acquire(adapter)
        sequence.state = SequenceState.RUNNING
        self.running.add(sequence)

    def _stop(self, sequence: Sequence) -> None:
        adapter = sequence.request.message.adapter
        self.running.remove(sequence)
        self.blocks.free(sequence.block_table)
        sequence.num_computed = sequence.num_published = 0
        if adapter is not None:
            sequence.slot = None
            self.slots.release(adapter)
            self.waiting.refile(adapter)

    def _wait_again(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        sequence.request.note_change("preempted", self._time.now)
        sequence.request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(sequence, first=True)

    def _settle(self, queue: AdapterQueue) -> None:
        if not queue:
            self.gate.release(queue)
        self.gate.settle()
        self._apply_quota(queue.tenant)

    def _apply_quota(self, tenant: Tenant) -> None:
        is_full = tenant.num_waiting > 0 and not tenant.can_run(1)
        if is_full and not tenant.is_held:
            self.hold(tenant)
        elif tenant.is_held and not is_full:
            self.waiting.reopen(tenant)
        self.gate.apply_quota(tenant)

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        hashes = sequence.block_hashes
        if len(hashes) >= num_blocks:
            return
        message = sequence.request.message
        # Only the first block's hash needs the seed.
        seed = b"" if hashes else cache_seed(message.tenant, message.adapter, message.cache_salt)
        extend_hashes(hashes, seed, sequence.token_ids, self.blocks.block_size, num_blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError if blocks, seats, slots, queues and sequences disagree."""
        waiting = [
            sequence
            for tenant in self.waiting.tenants.values()
            for queue in tenant.queues.values()
            for sequence in queue.waiting
        ]
        running = list(self.running)
        self.blocks.check_integrity(sequence.block_table for sequence in running)
        self.slots.check_integrity(_adapters_of(running), _adapters_of([*running, *waiting]))
        self.waiting.check_integrity()
        self.gate.check_integrity()
        assert all(s.state is SequenceState.WAITING and not s.block_table for s in waiting)
        assert all(s.is_running and s.num_uncomputed >= 1 for s in running)
        assert self.running.num_seats == sum(s.num_seats for s in running)
        for tenant in self.waiting.tenants.values():
            seats = sum(s.num_seats for s in running if s.request.queue.tenant is tenant)
            assert tenant.num_running == seats, f"{tenant.name}: seats"


def _adapters_of(sequences: SequenceOf[Sequence]) -> list[str]:
    adapters = (sequence.request.message.adapter for sequence in sequences)
    return [adapter for adapter in adapters if adapter is not None]
