"""What is owed to those who wait for a slot: the service that was lent past their claims.

While a claim waits for its victim to end, other sequences are served. A token served in that time
could have gone to one claim only, so it counts as lent past the *oldest* one; when that claim has
its slot, the count of the next one begins. So the first claim is overdue after `limit` tokens, the
k-th after k times as many, and preempting for slots costs at most one victim per `limit` tokens.

By itself that rule would let one borrower take everything that is lent past many claims, and run
ahead of all of them. So a claim, whatever its place, is also overdue once any single tenant was
served more than `limit` tokens since the claim was made.

When a seat and blocks are free for the head that waits, counting tokens says little: few are served
then, because slots are all that is short. A step that leaves such room unused adds a share of the
limit to the oldest claim, which becomes *due* that way: slots go round. Preempting for that costs a
load, and without a prefix cache the recomputation too; otherwise most of the prefix is found again,
since blocks are free. But nobody is owed it: a claim that is only due waits until the victim has
made some use of its slot, whereas one that is overdue does not wait.
"""

from collections import defaultdict
from collections.abc import Mapping
from math import isfinite


class Account:
    """Service lent past one claim, by borrower: from when it was made until the next claim was."""

    __slots__ = ("lent", "look_again_at")

    def __init__(self, look_again_at: float) -> None:
        self.lent = defaultdict[str, float](float)
        self.look_again_at = look_again_at
        """Until this much was served in all, no single borrower can have had the limit."""


class SlotDebt:
    """Accounts of all claims, the oldest first. Lending a token costs O(1), however many wait."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._served = 0.0
        self._oldest_since = 0.0
        """Tokens that had been served when the oldest claim became the oldest."""
        self._wasted = 0.0
        """Room left unused since then, as a multiple of the limit."""
        self._accounts: list[Account] = []

    def open(self) -> Account:
        """A claim is made."""
        if not self._accounts:
            self._begin()
        account = Account(self._served + self._limit)
        self._accounts.append(account)
        return account

    def close(self, account: Account) -> None:
        """A claim has its slot, or is given up. O(claims + borrowers since)."""
        index = self._accounts.index(account)
        del self._accounts[index]
        if index:
            _add(self._accounts[index - 1].lent, account.lent)
        else:
            self._begin()

    def lend(self, tenant: str, num_tokens: float) -> None:
        """A tenant was served this many tokens, weighted as in the counters."""
        self._served += num_tokens
        if self._accounts:
            self._accounts[-1].lent[tenant] += num_tokens

    def waste(self, share: float) -> None:
        """A step leaves room for the oldest claim's head unused: count this share of the limit."""
        self._wasted += share

    @property
    def is_due(self) -> bool:
        """Whether the oldest claim's victim should go once it has made some use of its slot."""
        if not self._accounts or not isfinite(self._limit):
            return False
        return self._served - self._oldest_since + self._limit * self._wasted > self._limit

    @property
    def is_overdue(self) -> bool:
        """Whether a claim has waited too long, so that a victim has to go now."""
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
