"""What a running server says about itself, over HTTP."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from typing import Any

from spec_core.errors import SpecError

_SECONDS = 5.0
_SAMPLE = re.compile(r'^(spec_\w+)(?:\{position="(\d+)"\})? (\S+)$', re.MULTILINE)


class ServerError(SpecError):
    """A server does not answer, or not as ours do."""


def ask(url: str, key: str | None) -> dict[str, Any]:
    """A server's model, mode, requests, acceptance and cache.

    Raises:
        ServerError: no server answers, it is no `spec serve`, or it needs a key.
    """
    base = url.rstrip("/").removesuffix("/v1")
    health = _json(_get(base, "/health", key), base)
    status = str(health.get("status", ""))
    seen: dict[str, Any] = {
        "url": base,
        "status": "ready" if status == "ok" else status,
        "running": health.get("running", 0),
        "waiting": health.get("waiting", 0),
        "model": None,
    }
    if status not in ("ok", "stalled"):
        return seen
    return seen | _model(base, key) | _counters(_get(base, "/metrics", key))


def _model(base: str, key: str | None) -> dict[str, Any]:
    listed = _json(_get(base, "/v1/models", key), base)
    try:
        card = listed["data"][0]
        own = card["x_spec"]
        return {
            "model": card["id"],
            "context_window": card["max_model_len"],
            "mode": own["mode"],
            "drafter": own["drafter"],
            "dtype": own["dtype"],
            "fallbacks": own["fallbacks"],
        }
    except (KeyError, IndexError, TypeError) as error:
        raise _foreign(base) from error


def _counters(text: str) -> dict[str, Any]:
    """The figures of a page of metrics."""
    found = {(name, slot): float(value) for name, slot, value in _SAMPLE.findall(text)}

    def of(name: str) -> int:
        return int(found.get((f"spec_{name}", ""), 0))

    drafts, accepted = of("decode_num_drafts_total"), of("decode_num_accepted_tokens_total")
    by_slot = sorted(
        (int(slot), value)
        for (name, slot), value in found.items()
        if name == "spec_decode_num_accepted_tokens_per_pos_total"
    )
    return {
        "memory_share": found.get(("spec_kv_cache_usage_perc", ""), 0.0),
        "mean_accept_length": 1 + accepted / drafts if drafts else None,
        "accept_by_position": [value / drafts for _, value in by_slot] if drafts else [],
        "prompt_tokens": of("prompt_tokens_total"),
        "generation_tokens": of("generation_tokens_total"),
        "cache": None
        if ("spec_prefix_cache_ram_bytes", "") not in found
        else {
            "hit_tokens": of("prefix_cache_hit_tokens_total"),
            "query_tokens": of("prefix_cache_query_tokens_total"),
            **{
                name: of(f"prefix_cache_{name}")
                for name in ("ram_bytes", "ram_limit_bytes", "disk_bytes", "disk_limit_bytes")
            },
        },
    }


def _get(base: str, path: str, key: str | None) -> str:
    """A page's text, also of one that says why the server cannot answer now.

    Raises:
        ServerError: there is none.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        request = urllib.request.Request(base + path, headers=headers)
        with _direct().open(request, timeout=_SECONDS) as reply:
            return str(reply.read().decode("utf-8"))
    except urllib.error.HTTPError as error:
        if error.code == 503 and path == "/health":
            return error.read().decode("utf-8")
        raise _refused(base, error.code) from error
    except (OSError, ValueError) as error:
        reason = _phrase(error)
        raise ServerError(
            f"no server answers at {base} ({reason}); start one with `spec serve`, or name "
            "another with --url"
        ) from error


def _phrase(error: Exception) -> str:
    """For instance "Connection refused"."""
    inner = getattr(error, "reason", error)
    return getattr(inner, "strerror", None) or str(inner)


def _direct() -> urllib.request.OpenerDirector:
    """Past proxies, which cannot know of a server on this machine."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _refused(base: str, status: int) -> ServerError:
    if status in (401, 403):
        return ServerError(f"the server at {base} wants its key: set SPEC_API_KEY, or --api-key")
    return _foreign(base)


def _foreign(base: str) -> ServerError:
    return ServerError(f"what answers at {base} is no `spec serve`; name another with --url")


def _json(text: str, base: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise _foreign(base) from error
    if not isinstance(value, dict):
        raise _foreign(base)
    return value
