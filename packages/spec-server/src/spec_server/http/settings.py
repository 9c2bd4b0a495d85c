"""How the HTTP surface behaves."""

from __future__ import annotations

from dataclasses import dataclass, field

from spec_core.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the HTTP surface behaves; what the engine does is `Limits`.

    Attributes:
        served_names: names, besides the model's own, that a request may ask for.
        api_keys: if there are any, every route but the health checks and the page needs one.
        cors_origins: pages of these origins may use the server from a browser.
        allowed_hosts: names in the Host header besides addresses and localhost; "*" allows any.
        max_body_bytes: the largest request body.
        body_seconds: how long a body may take to arrive.
        keepalive_seconds: how long a stream may be silent before a comment is sent.
        stall_seconds: without progress for so long, a busy engine is reported as not ready.
        max_choices: the most answers of one request (n times prompts).
        default_max_tokens: where a request names no budget; None: what the context has room for.
        page: serve the page for people at `/`, without a key: it holds nothing secret.

    Raises:
        InvalidValueError: a value is out of range.
    """

    served_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    body_seconds: float = 30.0
    keepalive_seconds: float = 10.0
    stall_seconds: float = 120.0
    max_choices: int = 16
    default_max_tokens: int | None = None
    page: bool = True

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_choices"):
            if getattr(self, name) < 1:
                raise InvalidValueError(name, getattr(self, name), "at least 1")
        for name in ("body_seconds", "keepalive_seconds", "stall_seconds"):
            if not getattr(self, name) > 0:
                raise InvalidValueError(name, getattr(self, name), "more than 0 seconds")
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise InvalidValueError("default_max_tokens", self.default_max_tokens, "at least 1")
        if any(not key for key in self.api_keys):
            raise InvalidValueError("api_key", "", "a text of at least one character")
        for origin in self.cors_origins:
            if (origin != "*" and "://" not in origin) or origin.endswith("/"):
                raise InvalidValueError(
                    "cors_origin", origin, 'an origin like "https://example.org", or "*" for any'
                )
