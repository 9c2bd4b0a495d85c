"""Prometheus metrics, under names that dashboards of other engines know (with their own prefix)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spec_cache import CacheStats
from spec_server.activity import Snapshot
from spec_server.results import Completion

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_COUNTERS = {
    "spec_decode_num_drafts": ("Rounds in which a request's guesses were verified", "drafts"),
    "spec_decode_num_draft_tokens": ("Guesses that were verified", "draft_tokens"),
    "spec_decode_num_accepted_tokens": ("Guesses that were accepted", "accepted_tokens"),
    "spec_prompt_tokens": ("Prompt tokens, reused ones included", "prompt_tokens"),
    "spec_generation_tokens": ("Generated tokens", "generation_tokens"),
    "spec_prefix_cache_queries": ("Prompts looked up in the prefix cache", "cache_queries"),
    "spec_prefix_cache_hits": ("Prompts that reused a prefix", "cache_hits"),
    "spec_prefix_cache_query_tokens": ("Tokens of prompts looked up", "cache_query_tokens"),
    "spec_prefix_cache_hit_tokens": ("Prompt tokens that were reused", "cache_hit_tokens"),
}
_GAUGES = {
    "spec_num_requests_running": ("Requests that have a row", "running"),
    "spec_num_requests_waiting": ("Requests that wait for a row", "waiting"),
    "spec_kv_cache_usage_perc": ("Share of the room for rows that is reserved, 0..1",
                                 "memory_share"),
    "spec_progress_age_seconds": ("Time since the engine's last step; 0 when idle",
                                  "progress_seconds"),
}  # fmt: skip
_CACHE_COUNTERS = {
    "spec_prefix_cache_stored_entries": ("Blocks and checkpoints stored", "stored_entries"),
    "spec_prefix_cache_refused_entries": (
        "Blocks and checkpoints that had no room",
        "refused_entries",
    ),
    "spec_prefix_cache_evicted_entries": ("Blocks and checkpoints that left memory", "evicted_ram"),
    "spec_prefix_cache_loaded_files": ("Files read from the cache directory", "loaded"),
    "spec_prefix_cache_written_files": ("Files written to the cache directory", "written"),
    "spec_prefix_cache_evicted_files": ("Files that left the cache directory", "evicted_disk"),
    "spec_prefix_cache_damaged_files": ("Files that could not be used", "damaged"),
}
_CACHE_GAUGES = {
    "spec_prefix_cache_ram_bytes": ("Memory that prefixes take", "ram_bytes"),
    "spec_prefix_cache_ram_limit_bytes": ("Memory that prefixes may take", "ram_limit"),
    "spec_prefix_cache_disk_bytes": ("What the cache directory holds", "disk_bytes"),
    "spec_prefix_cache_disk_limit_bytes": ("What the cache directory may hold", "disk_limit"),
    "spec_prefix_cache_waiting_files": ("Entries that are not written yet", "disk_waiting"),
}  # fmt: skip


class _EngineCollector(Collector):
    """Reads the engine's counters when it is scraped. Mean acceptance length is
    1 + accepted tokens / drafts."""

    def __init__(
        self,
        activity: Callable[[], Snapshot | None],
        cache: Callable[[], CacheStats | None],
    ) -> None:
        self._activity = activity
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        seen = self._activity() or Snapshot()
        for name, (text, attribute) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(seen, attribute))
        for name, (text, attribute) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(seen, attribute))
        positions = CounterMetricFamily(
            "spec_decode_num_accepted_tokens_per_pos",
            "Guesses that were accepted, by draft slot",
            labels=["position"],
        )
        for position, count in enumerate(seen.accepted_by_position):
            positions.add_metric([str(position)], count)
        yield positions
        yield from self._of_cache()

    def _of_cache(self) -> Iterator[Metric]:
        """Nothing where no prefixes are kept."""
        seen = self._cache()
        if seen is None:
            return
        for name, (text, attribute) in _CACHE_COUNTERS.items():
            yield CounterMetricFamily(name, text, value=getattr(seen, attribute))
        for name, (text, attribute) in _CACHE_GAUGES.items():
            yield GaugeMetricFamily(name, text, value=getattr(seen, attribute))


class Metrics:
    """One server's metrics, in a registry of their own.

    Args:
        activity: the engine's counters, or None while there is no engine.
        cache: the prefix cache's, or None without one.
    """

    def __init__(
        self,
        activity: Callable[[], Snapshot | None],
        cache: Callable[[], CacheStats | None] = lambda: None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(activity, cache))
        self._first_token = self._histogram(
            "time_to_first_token", "From a request's arrival to its first token", _SECONDS
        )
        self._per_token = self._histogram(
            "time_per_output_token", "Mean time of a token after the first", _TOKEN_SECONDS
        )
        self._latency = self._histogram(
            "e2e_request_latency", "From a request's arrival to its end", _SECONDS
        )
        self._queued = self._histogram(
            "request_queue_time", "From a request's arrival to a row", _SECONDS
        )
        self._ended = Counter(
            "spec_request_success",
            "Answers that ended, by why",
            ["finished_reason"],
            registry=self.registry,
        )
        self._refused = Counter(
            "spec_request_failure",
            "Requests that were refused or failed, by status",
            ["status"],
            registry=self.registry,
        )

    def completed(self, completion: Completion, reason: str) -> None:
        """An answer ended."""
        seen = completion.statistics
        self._ended.labels(reason).inc()
        self._latency.observe(seen.seconds)
        self._queued.observe(seen.queue_seconds)
        if completion.token_ids:
            self._first_token.observe(seen.ttft_seconds)
        if len(completion.token_ids) > 1:
            self._per_token.observe(1.0 / max(seen.tokens_per_second, 1e-9))

    def failed(self, status: int) -> None:
        """A request was answered with an error."""
        self._refused.labels(str(status)).inc()

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"spec_{name}_seconds", text, buckets=buckets, registry=self.registry)
