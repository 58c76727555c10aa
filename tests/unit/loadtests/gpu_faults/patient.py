"""Cases of a part that continues after errors."""

from __future__ import annotations

from tests.unit.loadtests.gpu_faults.faults import fail, succeed

CONTINUES_AFTER_ERRORS = True
CASES = {"first": succeed, "incorrect": fail, "last": succeed}
