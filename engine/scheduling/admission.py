"""Who of those that wait is admitted next, and when admission stops for this step."""

from engine.config import SchedulerConfig
from engine.scheduling.adapter_queue import AdapterQueue
from engine.scheduling.fair_order import comes_before
from engine.scheduling.fairness_bounds import service_unit
from engine.scheduling.lifecycle import Lifecycle
from engine.scheduling.sequence import Sequence
from engine.scheduling.wait_causes import WaitCause


class Admission:
    """The two halves of the admission loop: `next_queue` chooses, `admit` admits its head or stops.

    A head that lacks blocks, a seat or tokens stops admission for the step, because skipping it
    would let small requests starve large ones. A head that lacks only a slot reserves one and is
    passed over.
    """

    def __init__(self, lifecycle: Lifecycle, config: SchedulerConfig) -> None:
        self._lifecycle = lifecycle
        self._max_num_seqs = config.max_num_seqs
        self._max_lead = service_unit(config)

    def next_queue(self) -> AdapterQueue | None:
        """The queue to be served next; None if nobody can be. Makes reservations on the way.

        In this order: a queue whose reserved slot is ready, one whose head was preempted for its
        blocks, the least served queue of the least served tenant.
        """
        waiting, gate = self._lifecycle.waiting, self._lifecycle.gate
        can_reserve = True
        while True:
            queue = gate.first_ready()
            if queue is None:
                queue = self._first_resuming()
            if queue is None:
                queue = self._first_in_order(can_reserve)
            if queue is None:
                return None
            if queue.order is waiting.unplaced:
                can_reserve = gate.reserve(queue, has_room=self._lifecycle.has_room(queue.head))
            elif queue.order is waiting.unfetched:
                gate.hasten(queue)
            elif queue.tenant.can_run(queue.head.num_seats):
                return queue
            else:
                self._lifecycle.hold(queue.tenant)

    def admit(
        self, queue: AdapterQueue, *, max_prefill_tokens: int | None = None
    ) -> Sequence | None:
        """Admit the head of a ready queue; None if something is lacking: then admission stops.

        With `max_prefill_tokens`, a head that has more tokens to compute counts as lacking them.
        """
        lifecycle, head = self._lifecycle, queue.head
        if lifecycle.running.num_seats + head.num_seats > self._max_num_seqs:
            return self.stop(queue, "budget")
        cached = lifecycle.find_cached(head)
        blocks = lifecycle.blocks
        if max_prefill_tokens is not None:
            num_uncached = len(head.token_ids) - len(cached) * blocks.block_size
            if num_uncached > max_prefill_tokens:
                return self.stop(queue, "budget")
        num_tokens = len(head.token_ids)
        # One token more, or its first decode might preempt somebody.
        if not blocks.can_allocate(blocks.blocks_for(num_tokens + 1), cached):
            return self.stop(queue, "kv")
        lifecycle.admit(head, cached)
        return head

    def stop(self, queue: AdapterQueue | None, cause: WaitCause) -> None:
        """Stop admission at this queue's head, which waits for `cause` from now on."""
        self._lifecycle.waiting.stop_at(queue, cause)

    def _first_resuming(self) -> AdapterQueue | None:
        """The first queue whose head was preempted for its blocks, if it may go before others.

        It may not if it is further ahead of them than running on could have brought it: those who
        lose their blocks again and again could keep all others out.
        """
        queue = self._lifecycle.waiting.resuming.min()
        if queue is None:
            return None
        lead = max(
            queue.tenant.counter - self._lifecycle.waiting.floor,
            queue.counter - queue.tenant.contenders.floor,
        )
        return queue if lead <= self._max_lead else None

    def _first_in_order(self, can_reserve: bool) -> AdapterQueue | None:
        waiting = self._lifecycle.waiting
        orders = [waiting.ready, waiting.resuming]
        if can_reserve:
            orders.append(waiting.unplaced)
        if self._lifecycle.gate.can_hasten:
            orders.append(waiting.unfetched)
        first: AdapterQueue | None = None
        for queue in (order.min() for order in orders):
            if queue is not None and (first is None or comes_before(queue.head, first.head)):
                first = queue
        return first
