"""The sequences that run: each holds KV blocks, a seat and, with an adapter, a slot reference."""

from collections import Counter
from collections.abc import Iterator

from engine.scheduling.sequence import Sequence


class Running:
    """Running sequences in the order of their admission."""

    def __init__(self) -> None:
        self._sequences: dict[int, Sequence] = {}
        self.num_seats = 0
        """Seats of `max_num_seqs` in use; a sequence that will fork holds one for each choice."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def add(self, sequence: Sequence) -> None:
        """A sequence begins to run, and takes its seats."""
        self._sequences[sequence.sequence_id] = sequence
        queue = sequence.request.queue
        queue.num_running += 1
        if queue.num_running == 1 and queue.adapter is not None:
            queue.tenant.num_slots += 1
        self._move_seats(sequence, sequence.num_seats)

    def remove(self, sequence: Sequence) -> None:
        """A sequence stopped running."""
        del self._sequences[sequence.sequence_id]
        queue = sequence.request.queue
        queue.num_running -= 1
        if not queue.num_running and queue.adapter is not None:
            queue.tenant.num_slots -= 1
        self._move_seats(sequence, -sequence.num_seats)

    def keep_one_seat(self, sequence: Sequence) -> None:
        """A sequence forks: from now on it stands for its first choice alone."""
        self._move_seats(sequence, 1 - sequence.num_seats)
        sequence.stand_for(sequence.choices[:1])

    def victim(self) -> Sequence:
        """The sequence to preempt when blocks are lacking. O(running).

        It is the newest one of the most served tenant.
        """
        return max(
            (sequence for sequence in self._sequences.values() if not sequence.finished),
            key=lambda sequence: (
                sequence.request.queue.tenant.counter,
                sequence.request.arrival_number,
                sequence.choices,
            ),
        )

    def of_adapter(self, digest: str) -> list[Sequence]:
        """Running sequences of an adapter. O(running)."""
        return [s for s in self._sequences.values() if s.request.message.adapter == digest]

    def tokens_left(self) -> Counter[str | None]:
        """Output tokens that the running sequences may still draw, by adapter. O(running)."""
        left = Counter[str | None]()
        for sequence in self._sequences.values():
            left[sequence.request.message.adapter] += sequence.num_tokens_left
        return left

    def _move_seats(self, sequence: Sequence, num_seats: int) -> None:
        self.num_seats += num_seats
        sequence.request.queue.tenant.num_running += num_seats
