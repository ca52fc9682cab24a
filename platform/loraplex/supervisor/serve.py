"""`loraplex serve`, from its options to a running service: everything that can be wrong, first."""

import asyncio

import httpx
from rich.console import Console

from engine.errors import ConfigError
from engine.logs import configure_logs
from loraplex.settings import Settings, SettingsError
from loraplex.supervisor.children import Service
from loraplex.supervisor.data_dir import DataDir, DataDirError, open_data_dir, run_directory
from loraplex.supervisor.listeners import metrics_listeners, open_listener
from loraplex.supervisor.registry_start import (
    prepare_registry,
    prepare_schema,
    restore_usage,
    show_admin_key,
)
from loraplex.supervisor.serve_options import (
    ServeError,
    ServeOptions,
    engine_args_of,
    settings_of,
)
from loraplex.supervisor.served_model import check_model, resolve_model
from loraplex.supervisor.supervise import supervise


async def serve(options: ServeOptions) -> None:
    """Run the service until it is told to stop.

    Raises `ServeError`, or `ChildCannotStart` when a process refused to start and has said why.
    """
    configure_logs(process="supervisor")
    try:
        model_dir = resolve_model(options.model)
        check_model(options.model, model_dir)
        with (  # the ports first: who cannot have them leaves no data directory behind
            open_listener(options.host, options.port) as listener,
            metrics_listeners(options.metrics_port, options.workers) as for_metrics,
            open_data_dir(options.data_dir) as data,
            run_directory() as run_dir,
        ):
            engine = engine_args_of(options, model_dir, data, run_dir)
            settings = settings_of(options, model_dir, data, engine.socket_path)
            await prepare_schema(settings.storage.database_url)
            await prepare_registry(data, settings, options.base_names)
            url = _url(options.host, listener.getsockname()[1])
            service = Service(
                engine=engine,
                api=settings,
                listener=listener,
                metrics_listeners=for_metrics,
                workers=options.workers,
                api_silence_seconds=options.api_silence_seconds,
                drain_seconds=options.drain_seconds,
            )
            beside = (
                asyncio.create_task(_greet(url, options.model_name, data, settings)),
                asyncio.create_task(restore_usage(settings.storage)),
            )
            try:
                await supervise(service)
            finally:
                for task in beside:
                    task.cancel()
    except (DataDirError, SettingsError, ConfigError) as error:
        raise ServeError(str(error)) from None
    console = Console(stderr=True)
    if console.is_terminal:
        console.print("Stopped.")


def _url(host: str, port: int) -> str:
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{name}:{port}"


async def _greet(url: str, model_name: str, data: DataDir, settings: Settings) -> None:
    """Say where the service is, and in a terminal where its admin key is, once it is ready."""
    async with httpx.AsyncClient(base_url=url, timeout=2.0, trust_env=False) as http:
        while True:
            try:
                if (await http.get("/health/ready")).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.print(
            f"Loraplex serves {model_name} at {url}  (API: {url}/docs, dashboard: {url}/dashboard, "
            f"data: {data.root})",
            markup=False,
        )
        await show_admin_key(data, settings)
        return
    console.print(f"\nLoraplex serves {model_name} at {url}", style="bold", markup=False)
    console.print(f"  API page   {url}/docs\n  Dashboard  {url}/dashboard", markup=False)
    console.print(f"  Data       {data.root}", markup=False)
    await show_admin_key(data, settings)
    console.print("  Ctrl-C stops it.")
