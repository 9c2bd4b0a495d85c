"""Settings shared by the tests of all packages."""

from __future__ import annotations

from hypothesis import settings

# Tests run on loaded machines, so no example is judged by the clock.
settings.register_profile("spec", deadline=None)
settings.load_profile("spec")
