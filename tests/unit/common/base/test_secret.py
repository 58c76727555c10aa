"""What is derived from a mesh's secret differs by purpose and by secret."""

from meshrl.common.base.host.settings import SECRET_BYTES, derived


def test_derived_keys_differ() -> None:
    secrets = ["00" * SECRET_BYTES, "01" * SECRET_BYTES]
    found = {derived(secret, purpose) for secret in secrets for purpose in ("bulk", "redis")}
    assert len(found) == 4
    assert all(len(key) == 32 for key in found)
    assert derived(secrets[0], "bulk") == derived(secrets[0], "bulk")
