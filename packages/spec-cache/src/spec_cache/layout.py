"""From state images to stacked arrays, and back.

Arrays of one part that share dtype, shape and reach are stacked, so that a block of a model with
sixty layers is one or two arrays: few allocations, few copies, few tensors in a file. They are
kept as unsigned integers of the same item size, which files, checksums and NumPy understand.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TypedDict

import mlx.core as mx

from spec_cache.entry import Entry, Payload
from spec_cache.errors import CacheError, DamagedError
from spec_cache.keys import Chain, checkpoint_key
from spec_core.seams import PerToken, StateImage

DTYPES: Mapping[str, mx.Dtype] = MappingProxyType(
    {
        "BOOL": mx.bool_,
        "U8": mx.uint8,
        "I8": mx.int8,
        "U16": mx.uint16,
        "I16": mx.int16,
        "F16": mx.float16,
        "BF16": mx.bfloat16,
        "U32": mx.uint32,
        "I32": mx.int32,
        "F32": mx.float32,
        "U64": mx.uint64,
        "I64": mx.int64,
        "F64": mx.float64,
        "C64": mx.complex64,
    }
)
"""MLX dtypes by their names in safetensors files."""

CARRIERS: Mapping[int, mx.Dtype] = MappingProxyType(
    {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
)
"""The unsigned integers that stand in for any dtype, by item size."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _GroupJson(TypedDict):
    part: str
    names: list[str]
    dtype: str
    shape: list[int]
    reach: int | None


@dataclass(frozen=True, slots=True)
class Group:
    """Arrays that are stacked into one.

    Attributes:
        part: the part of the picture ("target", "drafter").
        names: their names in the image, in stacking order.
        dtype: as safetensors spells it.
        shape: of one array; without the position axis for arrays with an entry a position.
        reach: as in `PerToken`; None also for arrays at the end.
    """

    part: str
    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    reach: int | None = None

    @property
    def carrier(self) -> mx.Dtype:
        return CARRIERS[DTYPES[self.dtype].size]

    @property
    def row_bytes(self) -> int:
        """Bytes of one position of all its arrays (of the arrays themselves at the end)."""
        return len(self.names) * prod(self.shape) * DTYPES[self.dtype].size

    def most(self, count: int) -> int:
        """Positions worth holding of an entry that covers `count`."""
        return count if self.reach is None else min(count, self.reach)

    def begin(self, length: int) -> int:
        """First position needed to resume at `length`."""
        return 0 if self.reach is None else max(0, length - self.reach)


@dataclass(frozen=True, slots=True)
class Schema:
    """What the images of a namespace consist of.

    Attributes:
        parts: names of the parts, sorted.
        tokens: groups of arrays with an entry a position.
        ends: groups of arrays that are valid at one length only.
    """

    parts: tuple[str, ...]
    tokens: tuple[Group, ...]
    ends: tuple[Group, ...]

    @classmethod
    def of(cls, images: Mapping[str, StateImage]) -> Schema:
        """The schema of a picture. Raises CacheError where a dtype cannot be stored."""
        tokens: dict[tuple[str, str, tuple[int, ...], int | None], list[str]] = defaultdict(list)
        ends: dict[tuple[str, str, tuple[int, ...], None], list[str]] = defaultdict(list)
        for part in sorted(images):
            for name, held in sorted(images[part].per_token.items()):
                shape = tuple(held.array.shape[1:])
                tokens[part, _dtype_name(held.array), shape, held.reach].append(name)
            for name, array in sorted(images[part].at_end.items()):
                ends[part, _dtype_name(array), tuple(array.shape), None].append(name)
        return cls(
            tuple(sorted(images)),
            tuple(Group(k[0], tuple(names), *k[1:]) for k, names in tokens.items()),
            tuple(Group(k[0], tuple(names), *k[1:]) for k, names in ends.items()),
        )

    def resumes_anywhere(self, block: int) -> bool:
        """Whether any position inside a complete block can be resumed at."""
        return not self.ends and all(g.reach is None or g.reach >= block for g in self.tokens)

    def complete(self, entry: Entry) -> bool:
        return all(h == g.most(entry.count) for h, g in zip(entry.held, self.tokens, strict=True))

    def usable(self, entry: Entry) -> bool:
        """Whether an entry holds all positions of the groups without a reach."""
        pairs = zip(entry.held, self.tokens, strict=not entry.is_checkpoint)
        return all(h == entry.count for h, g in pairs if g.reach is None)

    def sizes(self, entry: Entry) -> list[int]:
        """Bytes of each of an entry's arrays."""
        if entry.is_checkpoint:
            return [group.row_bytes for group in self.ends]
        return [h * g.row_bytes for h, g in zip(entry.held, self.tokens, strict=True)]

    def shapes(self, entry: Entry) -> list[tuple[Group, tuple[int, ...]]]:
        """Group and stacked shape of each array of an entry, empty ones included."""
        if entry.is_checkpoint:
            return [(g, (len(g.names), *g.shape)) for g in self.ends]
        pairs = zip(self.tokens, entry.held, strict=True)
        return [(g, (len(g.names), held, *g.shape)) for g, held in pairs]

    def to_json(self) -> str:
        groups = [[_group_json(g) for g in side] for side in (self.tokens, self.ends)]
        return json.dumps([list(self.parts), *groups])

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """Raises DamagedError if the text is no schema."""
        try:
            parts, tokens, ends = json.loads(text)
            return cls(
                tuple(map(str, parts)),
                tuple(_group(g) for g in tokens),
                tuple(_group(g) for g in ends),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise DamagedError(f"its schema cannot be read ({error})") from None


def extent(images: Mapping[str, StateImage]) -> tuple[int, int]:
    """Start and length that all parts share. Raises CacheError where they differ."""
    extents = {(image.start, image.length) for image in images.values()}
    if len(extents) != 1:
        seen = {part: (image.start, image.length) for part, image in images.items()}
        raise CacheError(
            f"the parts of a picture must share one start and one length; they have {seen}"
        )
    return extents.pop()


def entries_in(
    chain: Chain, schema: Schema, images: Mapping[str, StateImage], checkpoint: bool
) -> list[Entry]:
    """The entries that a picture holds, in order of position.

    Full blocks only, or with `checkpoint` also the tail and the checkpoint at the picture's end.
    """
    start, length = extent(images)
    held = [min(_array(images, g, name).shape[0] for name in g.names) for g in schema.tokens]
    first_held = [length - positions for positions in held]
    entries = []
    for begin in range(-(-start // chain.block) * chain.block, length, chain.block):
        end = min(begin + chain.block, length)
        if checkpoint or end == begin + chain.block:
            entries.append(_block(chain, schema, begin, end, first_held))
    if checkpoint and schema.ends and length:
        owner = chain.key_at(length)
        entries.append(Entry(chain.root, checkpoint_key(owner), owner, length, 0))
    return entries


def _block(chain: Chain, schema: Schema, begin: int, end: int, first_held: Sequence[int]) -> Entry:
    """A block or tail, as far as each token group has its positions from `first_held` on."""
    count = end - begin
    held = tuple(
        min(group.most(count), max(0, end - first))
        for group, first in zip(schema.tokens, first_held, strict=True)
    )
    parent = chain.key(begin // chain.block)
    return Entry(chain.root, chain.key_at(end), parent, begin, count, held)


def cut(
    schema: Schema, images: Mapping[str, StateImage], entries: Sequence[Entry]
) -> list[tuple[mx.array | None, ...]]:
    """Owned, evaluated copies of what the entries cover, group by group.

    A slice would pin the buffer it was cut from. Adding zero to a slice makes a buffer of its own:
    MLX writes into an operand's buffer only if nobody else refers to it, and `whole` does until
    the copies are made.
    """
    columns: list[list[mx.array | None]] = []
    for number, group in enumerate(schema.tokens):
        whole = _stacked([_array(images, group, name) for name in group.names], group.carrier)
        last = images[group.part].length
        copies = [_copy_newest(whole, last, entry, number) for entry in entries]
        mx.eval([copy for copy in copies if copy is not None])
        columns.append(copies)
    return [tuple(column[i] for column in columns) for i in range(len(entries))]


def cut_ends(schema: Schema, images: Mapping[str, StateImage]) -> tuple[mx.array | None, ...]:
    """Owned, evaluated copies of the arrays at the end, group by group."""
    copies: list[mx.array | None] = []
    for group in schema.ends:
        ends = [images[group.part].at_end[name] for name in group.names]
        whole = _stacked(ends, group.carrier)
        copy = whole + mx.array(0, dtype=whole.dtype)
        mx.eval(copy)
        copies.append(copy)
    return tuple(copies)


def assemble(
    schema: Schema, length: int, payloads: Sequence[Payload], checkpoint: Payload | None
) -> dict[str, StateImage]:
    """The picture at `length`, from entries in order of position that cover what it needs."""
    tokens: dict[str, dict[str, PerToken]] = {part: {} for part in schema.parts}
    ends: dict[str, dict[str, mx.array]] = {part: {} for part in schema.parts}
    for number, group in enumerate(schema.tokens):
        joined = _join(group, number, length, payloads)
        for row, name in enumerate(group.names):
            tokens[group.part][name] = PerToken(joined[row], group.reach)
    for number, group in enumerate(schema.ends):
        stacked = None if checkpoint is None else checkpoint.arrays[number]
        assert stacked is not None
        for row, name in enumerate(group.names):
            ends[group.part][name] = stacked[row].view(DTYPES[group.dtype])
    mx.eval([h.array for arrays in tokens.values() for h in arrays.values()])
    mx.eval([array for arrays in ends.values() for array in arrays.values()])
    return {
        part: StateImage(0, length, MappingProxyType(tokens[part]), MappingProxyType(ends[part]))
        for part in schema.parts
    }


def _join(group: Group, number: int, length: int, payloads: Sequence[Payload]) -> mx.array:
    """[names, positions, ...] from the first position that `length` needs to the last."""
    pieces: list[mx.array] = []
    begin = group.begin(length)
    for payload in payloads:
        entry, array = payload.entry, payload.arrays[number]
        if array is None or entry.end <= begin:
            continue
        first = entry.end - array.shape[1]
        low, high = max(begin, first), min(entry.end, length)
        if low < high:
            pieces.append(array[:, low - first : high - first])
    if not pieces:
        return mx.zeros((len(group.names), 0, *group.shape), dtype=DTYPES[group.dtype])
    joined = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)
    return joined.view(DTYPES[group.dtype])


def _stacked(arrays: Sequence[mx.array], carrier: mx.Dtype) -> mx.array:
    """[arrays, ...] evaluated; arrays of different length keep their newest positions."""
    if arrays[0].ndim:
        shortest = min(array.shape[0] for array in arrays)
        arrays = [array[array.shape[0] - shortest :] for array in arrays]
    whole = mx.stack(list(arrays)).view(carrier)
    mx.eval(whole)
    return whole


def _copy_newest(whole: mx.array, last: int, entry: Entry, number: int) -> mx.array | None:
    """The entry's share of `whole`, whose positions end at `last`."""
    held = entry.held[number]
    if not held:
        return None
    stop = whole.shape[1] - (last - entry.end)
    return whole[:, stop - held : stop] + mx.array(0, dtype=whole.dtype)


def _array(images: Mapping[str, StateImage], group: Group, name: str) -> mx.array:
    return images[group.part].per_token[name].array


def _dtype_name(array: mx.array) -> str:
    name = _NAMES.get(array.dtype)
    if name is None:
        raise CacheError(f"arrays of {array.dtype} cannot be stored; known are {list(DTYPES)}")
    return name


def _group_json(group: Group) -> _GroupJson:
    return {
        "part": group.part,
        "names": list(group.names),
        "dtype": group.dtype,
        "shape": list(group.shape),
        "reach": group.reach,
    }


def _group(raw: _GroupJson) -> Group:
    if raw["dtype"] not in DTYPES:
        raise DamagedError(f"its schema has the unknown dtype {raw['dtype']!r}")
    reach = None if raw["reach"] is None else int(raw["reach"])
    shape = tuple(int(n) for n in raw["shape"])
    return Group(str(raw["part"]), tuple(map(str, raw["names"])), raw["dtype"], shape, reach)
