"""What is owed to those who wait for a slot: the service that was lent past their claims.

Service goes on while a claim waits for its victim to end. A token that is served in that time could
have gone to one claim, not to each, so it counts as lent past the *oldest*: when that one has its
slot, the next one's count begins. The first claim is overdue after `limit` tokens, the k-th after
k times as many, and preempting for slots costs at most one victim for each `limit` tokens.

That would let one borrower take all that is lent past many claims, and run away from every one of
them. So a claim is overdue too, whatever its place, once any single tenant was served more than
`limit` tokens since the claim was made.

Where a seat and blocks are free for the head that waits, tokens say little: few are served then,
and slots are all that is short. Such a step leaves room unused, which makes a claim due, as a share
of the limit: so slots go round. What is preempted for that finds most of its prefix in the cache,
for blocks are free, and seats lie idle; what it costs is the load, and without a cache computing
all of it again. So nobody is owed that: a claim that is only due waits until its victim has made
use of what its slot cost, one that is overdue does not.
"""

from collections import defaultdict
from collections.abc import Mapping
from math import isfinite


class Account:
    """One claim's. `lent` says to whom, since this claim was made and before the next one was."""

    __slots__ = ("lent", "look_again_at")

    def __init__(self, look_again_at: float) -> None:
        self.lent = defaultdict[str, float](float)
        self.look_again_at = look_again_at
        """Before so much was served in all, no single borrower can have had the limit."""


class SlotDebt:
    """Accounts of all claims, the oldest first. Lending a token costs O(1), however many wait."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._served = 0.0
        self._oldest_since = 0.0
        """What had been served when the oldest claim became that."""
        self._wasted = 0.0
        """Shares of the limit in room that was left unused since then."""
        self._accounts: list[Account] = []

    def open(self) -> Account:
        """A claim is made."""
        if not self._accounts:
            self._begin()
        account = Account(self._served + self._limit)
        self._accounts.append(account)
        return account

    def close(self, account: Account) -> None:
        """A claim has its slot, or is given up. O(claims and the borrowers since)."""
        index = self._accounts.index(account)
        del self._accounts[index]
        if index:
            _add(self._accounts[index - 1].lent, account.lent)
        else:
            self._begin()

    def lend(self, tenant: str, num_tokens: float) -> None:
        """A tenant was served, in tokens weighted as in the counters."""
        self._served += num_tokens
        if self._accounts:
            self._accounts[-1].lent[tenant] += num_tokens

    def waste(self, share: float) -> None:
        """A step begins with room for the oldest claim's head: worth this share of the limit."""
        self._wasted += share

    @property
    def is_due(self) -> bool:
        """Whether the oldest claim's victim should go as soon as it had some use of its slot."""
        if not self._accounts or not isfinite(self._limit):
            return False
        return self._served - self._oldest_since + self._limit * self._wasted > self._limit

    @property
    def is_overdue(self) -> bool:
        """Whether a claim has waited for too long, so that a victim has to go now."""
        if not self._accounts:
            return False
        if self._served - self._oldest_since > self._limit:
            return True
        return any(
            self._served > account.look_again_at and self._is_overborrowed(index)
            for index, account in enumerate(self._accounts)
        )

    def _begin(self) -> None:
        self._oldest_since = self._served
        self._wasted = 0.0

    def _is_overborrowed(self, index: int) -> bool:
        lent = defaultdict[str, float](float)
        for account in self._accounts[index:]:
            _add(lent, account.lent)
        most = max(lent.values(), default=0.0)
        # At worst, all that is served from now on goes to the one who had the most.
        self._accounts[index].look_again_at = self._served + self._limit - most
        return most > self._limit


def _add(total: defaultdict[str, float], lent: Mapping[str, float]) -> None:
    for tenant, num_tokens in lent.items():
        total[tenant] += num_tokens
