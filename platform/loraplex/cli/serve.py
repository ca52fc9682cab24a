"""`loraplex serve`: the service on one's own model."""

import asyncio
from pathlib import Path
from typing import Any

import click

from loraplex.supervisor.data_dir import default_data_dir


@click.command()
@click.option("--model", required=True, metavar="DIR_OR_HUB_ID", help="The base model.")
@click.option(
    "--served-model-name", "served_model_names", multiple=True,
    help="Name of the base model for clients; default: its folder's, or the hub's. Repeatable.",
)  # fmt: skip
@click.option(
    "--adapter-root", "adapter_roots", multiple=True, metavar="DIR",
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    help="Folder under which admins may register adapters by file://. Repeatable.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option(
    "--data-dir", envvar="LORAPLEX_DATA_DIR", type=click.Path(path_type=Path, file_okay=False),
    default=default_data_dir, help="Where everything lies; default: ~/.local/share/loraplex.",
)  # fmt: skip
@click.option("--max-loras", type=click.IntRange(0), default=8, show_default=True,
              help="Adapters that may run in one batch.")  # fmt: skip
@click.option("--max-lora-rank", type=click.IntRange(1, 512), default=64, show_default=True,
              help="Larger adapters are refused at upload.")  # fmt: skip
@click.option("--max-cpu-loras", type=click.IntRange(1), help="Adapters kept in host memory.")
@click.option("--cpu-lora-bytes", type=click.IntRange(1),
              help="Their bytes; default: a tenth of the machine's memory.")  # fmt: skip
@click.option("--disk-lora-bytes", type=click.IntRange(1), default=20 * 2**30,
              help="Bytes of adapters in the engine's cache on disk; default: 20 GiB.")  # fmt: skip
@click.option("--warm-up-seconds", type=click.FloatRange(0), default=30.0, show_default=True,
              envvar="LORAPLEX_WARM_UP_SECONDS",
              help="How long a new engine may load adapters before it is ready.")  # fmt: skip
@click.option("--max-queue-len", type=click.IntRange(1), default=4096, show_default=True,
              envvar="LORAPLEX_MAX_QUEUE_LEN",
              help="Requests that may wait, of all tenants together; more are 429.")  # fmt: skip
@click.option("--max-queued-per-tenant", type=click.IntRange(1), default=1024, show_default=True,
              envvar="LORAPLEX_MAX_QUEUED_PER_TENANT", help="Of one tenant.")  # fmt: skip
@click.option("--max-queued-per-adapter", type=click.IntRange(1), default=512, show_default=True,
              envvar="LORAPLEX_MAX_QUEUED_PER_ADAPTER",
              help="Of one tenant for one adapter, or for the base.")  # fmt: skip
@click.option("--max-num-seqs", type=click.IntRange(1), help="Sequences that run at once.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Token budget of a step.")
@click.option(
    "--max-model-len",
    type=click.IntRange(2),
    help="Prompt and output tokens at most; "
    "past a longrope model's original length, its long factors are used for all.",
)
@click.option("--num-kv-blocks", type=click.IntRange(2), help="KV cache blocks of 16 tokens.")
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]), default="auto",
    show_default=True, help="Of weights and KV cache; auto: as the model was saved.",
)  # fmt: skip
@click.option("--quantization", type=click.Choice(["int8", "fp8", "nf4", "int4"]),
              help="Hold the layers' weights in fewer bits; needs "
              "loraplex[quantization].")  # fmt: skip
@click.option("--kv-cache-dtype", type=click.Choice(["auto", "fp8"]), default="auto",
              show_default=True, help="Of keys and values: the model's, or 8-bit floats, on a "
              "GPU only.")  # fmt: skip
@click.option("--no-prefix-cache", is_flag=True, help="Recompute shared prompts.")
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True,
              help="API processes; more than 1 need PostgreSQL and Redis.")  # fmt: skip
@click.option("--api-silence-seconds", type=click.FloatRange(2), default=10.0, show_default=True,
              help="An API process that stands still for so long is started anew.")  # fmt: skip
@click.option("--drain-seconds", type=click.FloatRange(0), default=30.0, show_default=True,
              help="What running requests get after SIGTERM or Ctrl-C.")  # fmt: skip
@click.option("--hang-seconds", type=click.FloatRange(5), default=120.0, show_default=True,
              help="An engine whose step takes longer is started anew.")  # fmt: skip
@click.option("--metrics-port", type=click.IntRange(0, 65535), envvar="LORAPLEX_METRICS_PORT",
              help="Also serve /metrics on 127.0.0.1 at this port, without a key; of further API "
              "processes at the ports after it.")  # fmt: skip
@click.option("--metrics-adapters", type=click.IntRange(0), default=50, show_default=True,
              envvar="LORAPLEX_METRICS_ADAPTERS",
              help="Adapters with metrics of their own: those with most traffic.")  # fmt: skip
@click.option("--slo-ttft-ms", type=click.FloatRange(0, min_open=True), default=500.0,
              show_default=True, envvar="LORAPLEX_SLO_TTFT_MS",
              help="Goodput counts requests with a first token within so long,")  # fmt: skip
@click.option("--slo-tpot-ms", type=click.FloatRange(0, min_open=True), default=80.0,
              show_default=True, envvar="LORAPLEX_SLO_TPOT_MS",
              help="and with so long between two tokens on average.")  # fmt: skip
@click.option("--cpu-kernels", default="auto", show_default=True,
              help="What computes on a CPU: native, native/INSTRUCTION_SET or torch.")  # fmt: skip
@click.option("--threads", "num_threads", type=click.IntRange(1), help="CPU threads of the engine.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
              help="Where the model runs. No GPU has run this release: docs/gpu.md.")  # fmt: skip
@click.option("--gpu-memory-utilization", type=click.FloatRange(0, 1, min_open=True), default=0.9,
              show_default=True, help="Of a GPU's memory, at most.")  # fmt: skip
@click.option("--async-scheduling/--no-async-scheduling", default=None,
              help="Plan a decode step while one runs; by default on a GPU only.")  # fmt: skip
@click.option("--decode-ladder/--no-decode-ladder", default=None,
              help="Decode on static buffers, in CUDA graphs; by default on a GPU "
              "only.")  # fmt: skip
def serve(
    *, model: str, served_model_names: tuple[str, ...], adapter_roots: tuple[str, ...],
    host: str, port: int, data_dir: Path, workers: int, api_silence_seconds: float,
    drain_seconds: float, metrics_port: int | None, no_prefix_cache: bool, **engine: Any,
) -> None:  # fmt: skip
    """Serve a base model and the adapters of its tenants, on the OpenAI API.

    With nothing configured everything is embedded: an SQLite registry and adapters as files under
    the data directory, the engine in its own process.
    """
    from loraplex.supervisor.child import ChildCannotStart
    from loraplex.supervisor.serve import serve as run
    from loraplex.supervisor.serve_options import ServeError, ServeOptions

    options = ServeOptions(
        model=model,
        served_model_names=served_model_names,
        adapter_roots=adapter_roots,
        host=host,
        port=port,
        data_dir=data_dir,
        workers=workers,
        api_silence_seconds=api_silence_seconds,
        drain_seconds=drain_seconds,
        metrics_port=metrics_port,
        engine={  # all other options are named as its fields are
            **engine,
            "enable_prefix_cache": not no_prefix_cache,
            "drain_seconds": drain_seconds,
        },
    )
    try:
        asyncio.run(run(options))
    except ServeError as error:
        raise click.ClickException(str(error)) from None
    except ChildCannotStart:  # its own message is on the terminal
        raise click.exceptions.Exit(1) from None
