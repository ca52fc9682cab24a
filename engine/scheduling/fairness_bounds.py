"""What the scheduler promises, as formulas; docs/scheduler.md explains them.

All results are tokens weighted as in the counters: a prompt token counts 1, an output token
`output_weight`. They hold between tenants of weight 1, and between the queues of one tenant. The
service of a tenant with another weight is divided by that weight.
"""

from engine.config import SchedulerConfig

INPUT_WEIGHT = 1.0


def most_running_tokens(config: SchedulerConfig) -> float:
    """M: tokens of all sequences that run together, each counted at its full length.

    When the j-th last of them ends, j sequences share the pool and it is the shortest of them, so
    it has at most a j-th of the pool.
    """
    pool, longest = config.num_kv_blocks * config.block_size, config.max_sequence_len
    return sum(min(longest, pool / j) for j in range(1, config.max_num_seqs + 1))


def service_unit(config: SchedulerConfig) -> float:
    """U: what a tenant can still get after its last admission, when it only runs on.

    max(w_in x the longest prompt, w_out x M), as in Sheng et al. (OSDI 2024), whose M is taken
    here with sequences that end at different times.
    """
    output = config.output_weight * most_running_tokens(config)
    return max(INPUT_WEIGHT * config.max_sequence_len, output)


def step_service(config: SchedulerConfig) -> float:
    """The most that one step can be charged.

    A prompt is charged as a whole when its prefill begins, and at most two prefills that begin in a
    step do not end in it.
    """
    prompts = config.max_num_batched_tokens + 2 * config.max_sequence_len
    return INPUT_WEIGHT * prompts + config.output_weight * config.max_num_seqs


def counter_gap(config: SchedulerConfig, *, steps_of_a_load: int) -> float:
    """How far a counter can be ahead of one that waits: 4 U + D + what is served during a load.

    The parts: 2 U when the other one claims a slot (U by running on, U by resuming what lost its
    blocks); D until the claim is overdue; U until each of the victim's sequences has drawn a token;
    a load, and the two steps in which its begin and its end are noticed; and U again while the head
    whose slot is ready waits for a seat and blocks.

    The service of two that wait throughout an interval differs by at most twice as much: one can be
    ahead when the interval begins, and the other when it ends.
    """
    load = (steps_of_a_load + 2) * step_service(config)
    return 4 * service_unit(config) + config.slot_debt_limit + load


def claim_service(config: SchedulerConfig, *, claims_ahead: int) -> float:
    """What can be served before a claim has its slot: (claims ahead + 1) x (D + U + one step).

    U is there because a victim is preempted only after each of its sequences has drawn a token.
    """
    one = config.slot_debt_limit + service_unit(config) + step_service(config)
    return (claims_ahead + 1) * one
