"""Tool calls in a model's text: how they are written, and how they are taken out of it."""

from spec_server.tools.formats import ToolFormat, detect
from spec_server.tools.parsers import MalformedCallError, ToolCall
from spec_server.tools.split import ToolPiece, ToolSplit

__all__ = ["MalformedCallError", "ToolCall", "ToolFormat", "ToolPiece", "ToolSplit", "detect"]
