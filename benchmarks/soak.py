"""Run the whole service under everything at once, then see whether it is as it was.

`make soak MINUTES=30` runs it. A real model, real adapters, real processes and sockets: clients
that stream and leave, uploads over names in use, deletes, engines killed. At the end every count
must be what it was before, memory flat, every answer of a version equal to its first, and every
error one that a client can understand. Exit status 1: one of these does not hold.
"""

import argparse
import asyncio
import random
import shutil
import sys
import time
from pathlib import Path

import httpx

from benchmarks.soak_traffic import BASE, NAMES, Tenant, Traffic, kill_engines
from benchmarks.soak_watch import Watch, child
from loraplex.cli.api_client import ApiClient
from loraplex.demo.service import DemoService, demo_service
from loraplex.demo_examples import find_examples, load_adapters
from loraplex.weights import ensure_weights

# Fewer slots than adapters, and blocks for a fifth of what the seats could fill.
ENGINE = [
    "--max-loras", "2", "--max-cpu-loras", "3", "--max-num-seqs", "8", "--max-model-len", "512",
    "--max-num-batched-tokens", "96", "--num-kv-blocks", "48",
]  # fmt: skip
NUM_CLIENTS = 10
REST_SECONDS = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kill-every", type=float, default=180.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-log", type=Path, metavar="FILE", help="keep the service's log")
    options = parser.parse_args()
    model = ensure_weights()
    examples = [adapter.folder for adapter in load_adapters(find_examples())]
    with demo_service(model, BASE, ENGINE) as service:
        try:
            return asyncio.run(soak(service, examples, options))
        finally:
            if options.keep_log is not None:
                shutil.copyfile(service.log, options.keep_log)


async def soak(service: DemoService, examples: list[Path], options: argparse.Namespace) -> int:
    tenants = create_tenants(service)
    async with httpx.AsyncClient(base_url=service.url, timeout=120.0) as http:
        watch = Watch(service, http)
        traffic = Traffic(http, tenants, examples, options.seed)
        await warm_up(traffic, tenants, examples)
        before = await watch.counts_at_rest(None, REST_SECONDS)
        print(f"Soaking for {options.minutes:g} minutes, seed {options.seed} ...", flush=True)
        for name in NAMES:
            await traffic.upload(tenants[0], name, examples[0], random.Random(name))
        started = time.monotonic()
        sampler = asyncio.create_task(watch.sample_for_ever(max(1.0, options.minutes / 6)))
        actors = [asyncio.create_task(traffic.ask_for_ever(n)) for n in range(NUM_CLIENTS)]
        actors.append(asyncio.create_task(traffic.publish_for_ever()))
        # In the first half: the last engine then lives for long enough to show a slow leak.
        killer = asyncio.create_task(
            kill_engines(
                traffic,
                lambda: child(service, "engine"),
                options.kill_every,
                until=started + 30 * options.minutes,
            )
        )
        await asyncio.wait(
            [*actors, killer], timeout=60 * options.minutes, return_when="FIRST_EXCEPTION"
        )
        traffic.stopping.set()
        await asyncio.gather(*actors, killer)
        await watch.sample()
        sampler.cancel()
        for tenant in tenants:
            for name in NAMES:
                await traffic.delete(tenant, name)
        after = await watch.counts_at_rest(before, REST_SECONDS)
    return report(traffic, watch, before, after, time.monotonic() - started)


def create_tenants(service: DemoService) -> list[Tenant]:
    tenants: list[Tenant] = []
    with ApiClient(service.url, service.admin_key) as api:
        for name in ("acme", "globex"):
            api.call("POST", "/admin/tenants", json={"name": name})
            scopes = {"scopes": ["tenant", "inference"]}
            created = api.call("POST", f"/admin/tenants/{name}/keys", json=scopes)
            tenants.append(Tenant(name, created["key"]))
    return tenants


async def warm_up(traffic: Traffic, tenants: list[Tenant], examples: list[Path]) -> None:
    """Open what is opened once (connections, pools, threads), the engine restarted included."""
    draw = random.Random(0)
    for tenant in tenants:
        for name in NAMES:
            await traffic.upload(tenant, name, draw.choice(examples), draw)
    clients = [asyncio.create_task(traffic.ask_for_ever(-n)) for n in range(1, NUM_CLIENTS)]
    await asyncio.sleep(5)
    traffic.stopping.set()
    await asyncio.gather(*clients)
    traffic.stopping.clear()
    for tenant in tenants:
        for name in NAMES:
            await traffic.delete(tenant, name)


def report(
    traffic: Traffic, watch: Watch, before: dict[str, int], after: dict[str, int], seconds: float
) -> int:
    """Print one page; returns the exit status."""
    record = traffic.record
    print(f"\n{seconds / 60:.1f} minutes, {sum(record.outcomes.values())} actions:")
    for outcome, number in record.outcomes.most_common():
        print(f"  {number:8}  {outcome}")
    print(f"{record.num_compared} answers compared with an earlier one of the same version")
    totals = {name: watch.totals_of(name) for name in ("steps", "output_tokens", "preemptions")}
    print("engine: " + ", ".join(f"{number} {name}" for name, number in totals.items()))
    if record.recovery_seconds:
        print(
            f"{len(record.recovery_seconds)} engines killed: ready again after at most "
            f"{max(record.recovery_seconds):.1f} s; {len(record.error_seconds)} streams ended with "
            f"an error event after at most {max(record.error_seconds, default=0):.2f} s"
        )
    print("\nresident memory, MiB      first     last     peak")
    for memory in watch.memories:
        mark = "" if memory.is_flat else "   GROWS"
        print(
            f"  {memory.name:20} {memory.first:8.1f} {memory.last:8.1f} {max(memory.samples):8.1f}"
            f"{mark}"
        )
    print("\ncounts                   before    after")
    for name, number in before.items():
        mark = "" if after[name] == number else "   CHANGED"
        print(f"  {name:22} {number:7} {after[name]:8}{mark}")
    problems = record.faults[:20]
    problems += [f"{name} changed" for name in before if before[name] != after[name]]
    problems += [f"memory of {m.name} grows" for m in watch.memories if not m.is_flat]
    problems += [f"there was no {name}" for name, number in totals.items() if not number]
    print("\n" + ("PASS" if not problems else "FAIL\n  " + "\n  ".join(problems)))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
