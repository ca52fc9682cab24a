"""What the scheduler promises, as formulas: see docs/scheduler.md.

All are in tokens weighted as in the counters (a prompt token 1, an output token `output_weight`),
for tenants of weight 1 and an adapter's queues within one tenant alike. A tenant of another weight
has its service divided by it.
"""

from engine.config import SchedulerConfig

INPUT_WEIGHT = 1.0


def most_running_tokens(config: SchedulerConfig) -> float:
    """M: tokens of all sequences that run together, each counted at its full length.

    When the j-th last of them ends, j are there, each at least as long: it has at most a j-th of
    the pool.
    """
    pool, longest = config.num_kv_blocks * config.block_size, config.max_sequence_len
    return sum(min(longest, pool / j) for j in range(1, config.max_num_seqs + 1))


def service_unit(config: SchedulerConfig) -> float:
    """U: what a tenant can get after its last admission, when it runs on and admits nothing more.

    max(w_in x the longest prompt, w_out x M), as in Sheng et al. (OSDI 2024), whose M is taken
    here with sequences that end at different times.
    """
    output = config.output_weight * most_running_tokens(config)
    return max(INPUT_WEIGHT * config.max_sequence_len, output)


def step_service(config: SchedulerConfig) -> float:
    """What a step can be charged at most: a prompt is charged as a whole when its prefill begins.

    At most two prefills that begin in a step do not end in it.
    """
    prompts = config.max_num_batched_tokens + 2 * config.max_sequence_len
    return INPUT_WEIGHT * prompts + config.output_weight * config.max_num_seqs


def counter_gap(config: SchedulerConfig, *, steps_of_a_load: int) -> float:
    """How far a counter can be ahead of one that waits: 4 U + D + what is served during a load.

    At most 2 U ahead when the other claims a slot (U by running on, and U more by resuming what
    lost its blocks), D until the claim is overdue, U until all of the victim's sequences have drawn
    a token, then a load (and the step in which each of the two is noticed), and U once more while
    the head whose slot is there waits for a seat and blocks.
    The service of two that wait throughout an interval differs by at most twice as much: one can
    be ahead when it begins, the other when it ends.
    """
    load = (steps_of_a_load + 2) * step_service(config)
    return 4 * service_unit(config) + config.slot_debt_limit + load


def claim_service(config: SchedulerConfig, *, claims_ahead: int) -> float:
    """What can be served before a claim has its slot: (claims ahead + 1) x (D + U + a step).

    U, for a victim is not preempted before all of its sequences have drawn a token.
    """
    one = config.slot_debt_limit + service_unit(config) + step_service(config)
    return (claims_ahead + 1) * one
