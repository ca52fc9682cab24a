"""Whether a version can be served by the engine that runs now.

It could be when it was uploaded. A service may be started anew on another base model, with a
smaller rank, with less memory for adapters or on another device.
"""

from adapter_store.registry.records import ResolvedAdapter, VersionInfo
from engine.errors import EngineUnavailable
from loraplex.errors import ApiError
from loraplex.services import Services


def refusal(services: Services, version: ResolvedAdapter | VersionInfo) -> ApiError | None:
    """Return what a call of the version is answered, a 409; None for one that can be served.

    The limits are the last engine's while there is none; before the first, all are within them.
    """
    if version.base_fingerprint != services.backends.base_model.fingerprint:
        return _refused(
            "base_model_mismatch",
            f"{version.label} was trained on another base model than the one served now",
        )
    try:
        info = services.backends.engine.info
    except EngineUnavailable:
        return None
    if version.rank > info.max_lora_rank:
        return _refused(
            "rank_too_large",
            f"{version.label} has the rank {version.rank}; this service takes ranks up to "
            f"{info.max_lora_rank} now (`--max-lora-rank`)",
        )
    most = info.max_full_values
    if most is not None and version.full_values > most:
        limit = f"at most {most} now (`--cpu-lora-bytes`, `--max-loras`)" if most else "none now"
        return _refused(
            "full_weight_too_large",
            f"{version.label} has {version.full_values} values in an embedding or output layer of "
            f"its own; this service takes {limit}",
        )
    return None


def state_of(services: Services, version: VersionInfo) -> str:
    """Return `ready`, or the code with which calls of the version are refused now."""
    refused = refusal(services, version)
    return version.state if refused is None else refused.code


def _refused(code: str, message: str) -> ApiError:
    return ApiError(409, code, message, param="model")
