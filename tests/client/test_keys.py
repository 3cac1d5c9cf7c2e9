from __future__ import annotations

import hmac
import itertools
from pathlib import Path

import pytest

from leyden.client import control_key, mint, read_or_create_secret, verify
from leyden.errors import ConfigError, Unauthorized
from leyden.types import Claims, Scope

SECRET = bytes(range(32))
CLAIMS = Claims(Scope.AGENT, "train-00001-0003-002", 2, 2000.0)


@pytest.mark.parametrize("scope", list(Scope))
def test_a_minted_key_says_what_was_put_in(scope: Scope) -> None:
    claims = Claims(scope, "r-1_ü", 7, 2000.5)
    key = mint(SECRET, claims)
    assert key.startswith(f"lk-{scope[0]}-") and verify(SECRET, key, 2000.4) == claims


def test_format_is_fixed() -> None:
    assert mint(SECRET, CLAIMS) == ("lk-a-WyJ0cmFpbi0wMDAwMS0wMDAzLTAwMiIsMiwyMDAwLjBd-" + mint(SECRET, CLAIMS)[-43:])
    assert len({mint(SECRET, CLAIMS), mint(SECRET, CLAIMS)}) == 1


def test_expiry_is_exact() -> None:
    key = mint(SECRET, CLAIMS)
    assert verify(SECRET, key, 1999.999) == CLAIMS
    with pytest.raises(Unauthorized, match="the agent key expired 0 s ago"):
        verify(SECRET, key, 2000.0)


def test_signatures_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hmac.compare_digest alone, on the whole signature, before anything of the key is believed."""
    compared: list[tuple[str, str]] = []
    monkeypatch.setattr(hmac, "compare_digest", lambda *both: compared.append(both))
    key = mint(SECRET, CLAIMS)
    with pytest.raises(Unauthorized, match="was not issued by this run"):
        verify(SECRET, key, 1e12)
    assert compared == [(key[-43:], key[-43:])]


def test_every_changed_character_is_noticed() -> None:
    key = mint(SECRET, CLAIMS)
    for i, other in itertools.product(range(len(key)), "Ab_-"):
        forged = key[:i] + other + key[i + 1 :]
        if forged != key:
            with pytest.raises(Unauthorized):
                verify(SECRET, forged, 0.0)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "lk-",
        "sk-abc",
        "lk-a-" + "x" * 43,
        "lk-a--" + "x" * 43,
        "lk-x-abc-" + "x" * 43,
        "ü" * 80,
        "lk-a-" + "A" * 5000,
    ],
)
def test_what_is_no_key_is_refused_without_repeating_it(key: str) -> None:
    with pytest.raises(Unauthorized) as caught:
        verify(SECRET, key, 0.0)
    assert caught.value.status == 401 and (len(key) < 8 or key[:8] not in str(caught.value))


def test_scope_cannot_be_raised_and_another_secret_is_another_run() -> None:
    key = mint(SECRET, CLAIMS)
    with pytest.raises(Unauthorized, match="not issued by this run"):
        verify(SECRET, "lk-c-" + key[5:], 0.0)
    with pytest.raises(Unauthorized, match="not issued by this run"):
        verify(SECRET[::-1], key, 0.0)


def test_payload_of_another_version_is_refused() -> None:
    import leyden.client.keys as keys

    for payload in (b"[]", b"[1,2,3]", b'["r",1,"soon"]', b'["r",1,NaN]', b"{", b"\xff"):
        body = f"lk-a-{keys._encode(payload)}"
        with pytest.raises(Unauthorized, match="of another version"):
            verify(SECRET, f"{body}-{keys.sign(SECRET, body)}", 0.0)


def test_control_key_lasts_a_year() -> None:
    key = control_key(SECRET, now=100.0)
    assert verify(SECRET, key, 100.0) == Claims(Scope.CONTROL, "", 0, 100.0 + 365 * 86400)


def test_secret_is_made_once_and_private(tmp_path: Path) -> None:
    secret = read_or_create_secret(tmp_path)
    assert len(secret) == 32 and read_or_create_secret(tmp_path) == secret
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("ab" * 32, 0o644, "can be read by other users"),
        ("ab", 0o600, "holds 1 bytes"),
        ("zz", 0o600, "not hexadecimal"),
    ],
)
def test_unfit_secret_is_refused(tmp_path: Path, text: str, mode: int, message: str) -> None:
    (tmp_path / "secret").write_text(text)
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(ConfigError, match=message):
        read_or_create_secret(tmp_path)
