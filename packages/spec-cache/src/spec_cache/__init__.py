"""A content-addressed prefix cache for MLX models, in memory and on disk.

It works over the state images of spec_core and knows nothing of models.
"""

from spec_cache.cache import PrefixCache
from spec_cache.directory import StoredNamespace, clear_directory, list_directory
from spec_cache.errors import CacheError
from spec_cache.keys import Namespace
from spec_cache.plan import checkpoint_lengths, chunk_end
from spec_cache.reserve import Reservation
from spec_cache.results import CacheStats, Hit, Stopped, Stored
from spec_cache.reuse import PrefixReuse, Reuse, Thread

__all__ = [
    "CacheError",
    "CacheStats",
    "Hit",
    "Namespace",
    "PrefixCache",
    "PrefixReuse",
    "Reservation",
    "Reuse",
    "Stopped",
    "Stored",
    "StoredNamespace",
    "Thread",
    "checkpoint_lengths",
    "chunk_end",
    "clear_directory",
    "list_directory",
]
