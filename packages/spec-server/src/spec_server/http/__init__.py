"""The HTTP surface: an OpenAI-compatible ASGI app."""

from spec_server.http.app import create_app
from spec_server.http.service import EngineSlot
from spec_server.http.settings import ServerSettings

__all__ = ["EngineSlot", "ServerSettings", "create_app"]
