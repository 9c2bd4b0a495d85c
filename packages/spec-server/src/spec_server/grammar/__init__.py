"""Answers held to a grammar: JSON schemas and required tool calls, as masks for the chooser."""

from spec_server.grammar.compiler import (
    ANY_OBJECT,
    AnswerGrammar,
    CallsAnswer,
    GrammarCompiler,
    GrammarLimits,
    JsonAnswer,
    thought_switch,
)
from spec_server.grammar.constraint import GrammarConstraint
from spec_server.grammar.lark import Function
from spec_server.grammar.schema import check_schema

__all__ = [
    "ANY_OBJECT",
    "AnswerGrammar",
    "CallsAnswer",
    "Function",
    "GrammarCompiler",
    "GrammarConstraint",
    "GrammarLimits",
    "JsonAnswer",
    "check_schema",
    "thought_switch",
]
