"""The seams: what a target, a drafter, a policy and a prefix cache are to the round.

Tokens and arrays only; no text, no model names. Shapes: B rows, T positions, K drafted
positions, V vocabulary, H hidden size. What crosses a seam is a frozen dataclass or an
`mx.array`. Token arrays are int32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol, runtime_checkable

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from spec_core.errors import SeamError

LogitRows = Literal["all", "last", "none"]
"""Which positions of a forward reach the head: every one, each row's last valid one, or none."""


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """Facts about a target that a drafter must fit.

    Attributes:
        family: the architecture's name in config.json (`model_type`).
        vocab_size: V, the number of columns of the logits.
        hidden_size: H, the width of a tap.
        num_layers: the number of decoder layers; taps are 0..num_layers-1, and -1 for the
            embedding output.
        context_window: the most positions the model was made for.
        embed_scale: what the target multiplies its embedding rows with before layer 0.
        logit_softcap: cap of `cap * tanh(x / cap)` on the logits, or None.
        tappable: whether taps were proven at load; if not, `taps_refused` says why.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    context_window: int
    embed_scale: float = 1.0
    logit_softcap: float | None = None
    tappable: bool = True
    taps_refused: str = ""


@dataclass(frozen=True, slots=True)
class Forward:
    """What one forward pass gave.

    Attributes:
        logits: [B, T, V] ("all"), [B, 1, V] ("last": column valid[b] - 1) or None.
        taps: one [B, T, H] array for each requested layer, in the order asked.
    """

    logits: mx.array | None
    taps: tuple[mx.array, ...] = ()


@dataclass(frozen=True, slots=True)
class Proposal:
    """Guesses for the positions after the anchor.

    Attributes:
        tokens: [B, K]. Columns at or beyond `lengths[b]` repeat any legal token id.
        lengths: how many columns of each row are guesses, 0 <= lengths[b] <= K, on the host.
        log_q: [B, K, V] natural log of the distribution that each guess was drawn from, or
            None where every guess is deterministic (one-hot).
        confidence: [B, K] probability in 0..1 that a guess is accepted given that all before
            it are, or None where the drafter does not know. Slot j's value depends on the
            anchor and the guesses before j only, so cutting at the first low slot is lossless.
        sources: for each row, who guessed ("dspark", "lookup", ...); statistics only.
    """

    tokens: mx.array
    lengths: tuple[int, ...]
    log_q: mx.array | None = None
    confidence: mx.array | None = None
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or len(self.lengths) != self.tokens.shape[0]:
            raise SeamError(
                f"proposal has tokens of shape {self.tokens.shape} and {len(self.lengths)} "
                "lengths; it needs [rows, columns] and one length a row"
            )
        if any(not 0 <= n <= self.tokens.shape[1] for n in self.lengths):
            raise SeamError(
                f"proposal lengths {self.lengths} do not lie in 0..{self.tokens.shape[1]}"
            )


@dataclass(frozen=True, slots=True)
class PerToken:
    """An image's array with one entry a position.

    Attributes:
        array: first axis = position, from the image's `start` on.
        reach: resuming at length n needs only the last `reach` positions before n;
            None: all of them.
    """

    array: mx.array
    reach: int | None = None


@dataclass(frozen=True, slots=True)
class StateImage:
    """An immutable picture of one row: owned, evaluated copies, never views of a live buffer.

    Attributes:
        start: first position held by the `per_token` arrays.
        length: the number of positions the row had seen.
        per_token: arrays with an entry for each position in start..length-1 (an array with a
            `reach` may hold fewer, then the newest ones).
        at_end: arrays that are valid at exactly `length` (recurrent state).
    """

    start: int
    length: int
    per_token: Mapping[str, PerToken] = field(default_factory=lambda: MappingProxyType({}))
    at_end: Mapping[str, mx.array] = field(default_factory=lambda: MappingProxyType({}))


class RowState(Protocol):
    """The verbs that target states and drafter states share. Rows are numbered 0..rows-1.

    No verb may be called while a forward's result is provisional, `commit` aside.
    """

    @property
    def rows(self) -> int: ...

    @property
    def lengths(self) -> Sequence[int]:
        """Committed positions of each row (for a drafter: absolute, as if it had seen all)."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; the others leave. Moves as few rows as it can."""

    def join(self, other: RowState) -> None:
        """Append the rows of `other`, of the same kind; `other` must not be used afterwards.

        Raises SeamError where the kinds differ.
        """

    def image(self, row: int, start: int = 0) -> StateImage:
        """An owned, evaluated copy of one row's positions from `start` on."""

    def restore(self, row: int, image: StateImage) -> None:
        """Write an image (start 0, or all within reach) into a row of length 0."""

    def pending(self) -> Sequence[mx.array]:
        """The live buffers and what is still being done to them, for evaluation only: evaluate and
        forget, never keep."""


class TargetState(RowState, Protocol):
    """What a target remembers about B rows."""

    def commit(self, keep: Sequence[int]) -> None:
        """Keep the first keep[b] provisional positions of row b and forget the rest, exactly.

        Raises SeamError unless 0 <= keep[b] <= valid[b] of the provisional forward.
        """


class EmbeddingLender(Protocol):
    """A target's embedding and head, lent to a drafter that has none."""

    def embed(self, tokens: mx.array) -> mx.array:
        """Rows of the embedding matrix, [..., H], *before* `TargetInfo.embed_scale`."""

    def unembed(self, hidden: mx.array) -> mx.array:
        """Logits [..., V] of normed hidden states, *before* `TargetInfo.logit_softcap`."""


class Target(Protocol):
    """A model that can be asked about candidate tokens and taken back."""

    @property
    def info(self) -> TargetInfo: ...

    @property
    def lender(self) -> EmbeddingLender | None: ...

    def new_state(self, rows: int) -> TargetState: ...

    def forward(
        self,
        tokens: mx.array,
        state: TargetState,
        *,
        taps: Sequence[int] = (),
        logits: LogitRows = "all",
        valid: Sequence[int] | None = None,
    ) -> Forward:
        """Append T provisional positions to every row, lazily.

        Args:
            tokens: [B, T]. Columns at or beyond `valid[b]` repeat a real token; what comes out
                for them is undefined but finite.
            state: of this target, with nothing provisional.
            taps: layers whose output is wanted; layer i counts from 0, -1 is the embedding
                output as fed to layer 0.
            logits: which positions reach the head.
            valid: how many columns of each row are real (all, if None).

        Raises:
            SeamError: a forward is still provisional, or a shape does not fit.
            UnsupportedError: taps were asked of a target that is not tappable.
        """


class DrafterState(RowState, Protocol):
    """What a drafter remembers about B rows."""


class Chooser(Protocol):
    """One round's sampler, as a drafter sees it: logits in, tokens out.

    The order is fixed: penalties, bias, mask, temperature, top-k, top-p, min-p; ties go to the
    lowest token id. A drafter never learns how a row samples.
    """

    def draft(
        self,
        logits: mx.array,
        slot: int,
        prefix: mx.array,
        token_ids: mx.array | None = None,
    ) -> DraftChoice:
        """Choose one token a row for one draft slot.

        Args:
            logits: [B, V], or [B, Vd] with `token_ids`.
            slot: 0 = the first after the anchor.
            prefix: [B, slot] the tokens drafted before this slot.
            token_ids: [Vd] int32 target id of each draft id (reduced vocabularies).
        """

    def draft_block(self, logits: mx.array, token_ids: mx.array | None = None) -> DraftChoice:
        """Choose [B, K] tokens from [B, K, V] logits that do not depend on each other."""


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """Tokens (target ids, [B] or [B, K]) and the log of what they were drawn from.

    `log_q` ([B, V] or [B, K, V]) is None where no row needs it (deterministic choices).
    """

    tokens: mx.array
    log_q: mx.array | None


class Drafter(Protocol):
    """Proposes, then is told what happened."""

    @property
    def name(self) -> str:
        """The mode's name in statistics: "dspark", "dflash", "lookup", ..."""

    @property
    def taps(self) -> Sequence[int]:
        """The target layers it reads, in order; empty if it reads none."""

    @property
    def max_block(self) -> int:
        """The most tokens it proposes in a round."""

    @property
    def needs_host_tokens(self) -> bool:
        """It searches text: it is asked only once the last round is settled, and the arrays it
        is given are evaluated, so that `tolist()` costs no wait."""

    def new_state(self, rows: int, start: int = 0) -> DrafterState:
        """`start` > 0: the context before it was never seen. Absolute positions are kept,
        drafts are worse."""

    def extend(
        self,
        state: DrafterState,
        tokens: mx.array,
        taps: Sequence[mx.array],
        keep: Sequence[int],
    ) -> None:
        """Tell what was forwarded: [B, T] columns (the anchor first) with their taps, of which
        row b keeps the first keep[b]. The new anchor is not among them. Lazy."""

    def propose(
        self, state: DrafterState, anchor: mx.array, count: int, chooser: Chooser
    ) -> Proposal:
        """Guess up to `count` tokens (1 <= count <= max_block) after anchor [B]. Lazy, unless
        `needs_host_tokens`."""


@runtime_checkable
class Copier(Drafter, Protocol):
    """A drafter that copies from the text, and knows beforehand how far.

    `propose` gives the rows with a match min(count, copies) tokens of it, the other rows guesses
    of another kind, or none.

    Attributes:
        copies_only: it has nothing but copies.
    """

    copies_only: bool

    def copies(self, state: DrafterState, anchors: Sequence[int]) -> Sequence[int]:
        """How many tokens each row could copy after its anchor, 0 without a match. `anchors` are
        on the host. Changes nothing."""

    def verifying(self, state: DrafterState, lengths: Sequence[int]) -> None:
        """How many of each row's guesses the round verifies, right after they were proposed. What
        is not verified says nothing about the guesses."""


class Constraint(Protocol):
    """A grammar on one row, made on the host. Its state advances by committed tokens only."""

    def masks(self, drafts: Sequence[int]) -> npt.NDArray[np.bool_]:
        """[len(drafts) + 1, V] allowed tokens: entry i follows the committed text and the
        first i drafts. Where draft i - 1 is itself outside the grammar, entry i is all true."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Commit emitted tokens."""


Finish = Literal["stop", "length"]
"""Why a row ended: an end token, or its budget."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-softmax of the target's raw logits at an emitted position.

    Attributes:
        token: the emitted id.
        logprob: its value.
        top: (id, value) of the most likely ids, best first, as many as were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What one settled round did to one row.

    Attributes:
        key: the row's key in its batch.
        tokens: emitted ids, after the cut at an end token or the budget; never empty.
        drafted: how many guesses were verified.
        accepted: how many of them were accepted, before the cut.
        source: who guessed; "" for a plain step.
        finish: "stop", "length", or None while the row goes on.
        prefill: true for the token that the prompt's own forward gave (not a round).
        logprobs: one entry a token, where asked for.
    """

    key: int
    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    source: str = ""
    finish: Finish | None = None
    prefill: bool = False
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class RowStatus:
    """What a policy may know about a row before a round.

    Attributes:
        key: stable while the row lives.
        length: committed positions.
        remaining: how many more tokens it may emit, at least 1.
        max_draft: the row's own cap on guesses (0 = plain), or None.
        copies: how many tokens could be copied from the row's text, instead of what the drafter
            would guess; 0 where nothing matches, or the drafter is no `Copier`.
    """

    key: int
    length: int
    remaining: int
    max_draft: int | None = None
    copies: int = 0


class DraftPolicy(Protocol):
    """How far to draft."""

    @property
    def needs_confidence(self) -> bool:
        """`truncate` wants to see scores before the round is verified (one short read)."""

    def lengths(self, rows: Sequence[RowStatus]) -> Sequence[int]:
        """Guesses to ask for, one a row; 0 = plain step; the round caps it at remaining - 1."""

    def truncate(
        self,
        rows: Sequence[RowStatus],
        lengths: Sequence[int],
        confidence: Sequence[Sequence[float]],
    ) -> Sequence[int]:
        """Cut a proposal by its scores; called only if `needs_confidence`."""

    def observe(self, outcomes: Sequence[RowOutcome], seconds: float | None) -> None:
        """What the round did, and the wall time from launch to settle; None where a prompt was
        computed meanwhile, so that the time says nothing about the round."""
