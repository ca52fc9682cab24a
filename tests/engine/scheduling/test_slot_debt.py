"""When a claim for a slot has waited for too long."""

import random

from engine.scheduling.slot_debt import Account, SlotDebt


def test_the_kth_claim_is_overdue_after_k_times_the_limit_when_many_share_what_is_lent():
    debt = SlotDebt(limit=100)
    accounts = [debt.open() for _ in range(3)]
    served = 0
    for account in accounts:
        while not debt.is_overdue:
            debt.lend(f"tenant-{served % 10}", 1)
            served += 1
        assert served == 101 * (1 + accounts.index(account))
        debt.close(account)
    assert not debt.is_overdue


def test_any_claim_is_overdue_once_a_single_tenant_had_the_limit_since_it_was_made():
    debt = SlotDebt(limit=100)
    first = debt.open()
    debt.lend("greedy", 40)
    second = debt.open()
    debt.lend("greedy", 60)
    assert not debt.is_overdue
    debt.close(first)
    debt.lend("other", 90)
    assert not debt.is_overdue, "of what is lent now, the second claim is owed 90"
    third = debt.open()
    debt.close(second)
    debt.lend("greedy", 100)
    assert not debt.is_overdue, "since the third was made"
    debt.lend("greedy", 1)
    assert debt.is_overdue
    debt.close(third)
    assert not debt.is_overdue


def test_it_equals_a_ledger_of_everything_that_was_ever_lent():
    rng = random.Random(0)
    limit = 50
    debt = SlotDebt(limit)
    claims: list[tuple[Account, int]] = []  # account, index into the history when it was made
    history: list[tuple[str, int]] = []
    oldest_since = 0
    num_overdue = 0
    for _ in range(4000):
        action = rng.random()
        if action < 0.1 and len(claims) < 5:
            if not claims:
                oldest_since = len(history)
            claims.append((debt.open(), len(history)))
        elif action < 0.15 and claims:
            index = rng.randrange(len(claims))
            debt.close(claims.pop(index)[0])
            if index == 0:
                oldest_since = len(history)
        else:
            tenant, tokens = rng.choice(["a", "a", "b", "c"]), rng.randint(1, 5)
            history.append((tenant, tokens))
            debt.lend(tenant, tokens)
        expected = bool(claims) and (
            sum(tokens for _, tokens in history[oldest_since:]) > limit
            or any(
                sum(tokens for name, tokens in history[made:] if name == tenant) > limit
                for _, made in claims
                for tenant in "abc"
            )
        )
        assert debt.is_overdue == expected
        if expected:
            num_overdue += 1
            debt.close(claims.pop(0)[0])
            oldest_since = len(history)
    assert num_overdue > 20


def test_without_a_limit_nothing_is_ever_overdue():
    debt = SlotDebt(float("inf"))
    debt.open()
    debt.lend("a", 1e12)
    debt.waste(2.0)
    assert not debt.is_overdue and not debt.is_due


def test_room_that_is_left_unused_makes_the_oldest_claim_due_but_not_overdue():
    debt = SlotDebt(limit=100)
    first, second = debt.open(), debt.open()
    debt.waste(0.5)
    debt.lend("a", 50)
    assert not debt.is_due
    debt.lend("b", 1)
    assert debt.is_due and not debt.is_overdue
    debt.close(first)
    assert not debt.is_due, "the next one's count begins"
    debt.waste(1.1)
    assert debt.is_due and not debt.is_overdue
    debt.close(second)
    assert not debt.is_due
