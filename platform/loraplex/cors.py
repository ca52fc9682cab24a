"""Which web pages may call the API from a browser: none, unless their origins are listed."""

from urllib.parse import urlsplit

from litestar.config.cors import CORSConfig

from loraplex.settings import CorsSettings, SettingsError

_SHOWN = (
    "retry-after", "x-request-id", "x-loraplex-adapter", "x-loraplex-trace-id",
    *(f"x-loraplex-{part}" for part in ("queue", "queue-ms", "load-ms", "prefill-ms", "decode-ms")),
    *(f"x-loraplex-queue-{part}" for part in ("length", "limit", "drain-per-second")),
    *(
        f"x-ratelimit-{part}-{of}"
        for part in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
)  # fmt: skip


def cors_config(settings: CorsSettings) -> CORSConfig | None:
    """Cross-origin calls by the listed origins, with a key in a header and never with a cookie.

    None: no origin is listed. Raises `SettingsError` for what is no origin.
    """
    for origin in settings.cors_origins:
        if origin != "*" and not _is_origin(origin):
            raise SettingsError(
                f"LORAPLEX_CORS_ORIGINS: {origin!r} is no origin like https://app.example.com, or *"
            )
    if not settings.cors_origins:
        return None
    return CORSConfig(
        allow_origins=list(settings.cors_origins),
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        expose_headers=list(_SHOWN),
    )


def _is_origin(text: str) -> bool:
    parts = urlsplit(text)
    return (
        parts.scheme in {"http", "https"}
        and bool(parts.netloc)
        and text == f"{parts.scheme}://{parts.netloc}"
    )
