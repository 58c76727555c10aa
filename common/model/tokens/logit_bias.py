"""Ids of the tokens that `rollout.logit_bias` names."""

from __future__ import annotations

from collections.abc import Mapping

from meshrl.common.base.errors import ConfigError
from meshrl.common.model.tokens.tokenizer import Tokenizer

ID_PREFIX = "id:"


def resolve_logit_bias(
    tokenizer: Tokenizer, table: Mapping[str, float]
) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) of each key, the text of one token or `id:N`; ConfigError."""
    found: dict[int, float] = {}
    for key, bias in table.items():
        token = _find_token(tokenizer, key)
        if token in found:
            raise ConfigError(f"{key!r} is a token that another key names too", fix="Remove one")
        found[token] = float(bias)
    return tuple(found.items())


def _find_token(tokenizer: Tokenizer, key: str) -> int:
    digits = key.removeprefix(ID_PREFIX)
    if digits != key and digits.isdecimal() and tokenizer.id_to_token(int(digits)) is not None:
        return int(digits)
    token = tokenizer.token_to_id(key)
    if token is not None:
        return token
    fix = "Name one token by its text, or by its id as id:N"
    if key.isdecimal() and tokenizer.id_to_token(int(key)) is not None:
        fix = f'For the token with this id, write "{ID_PREFIX}{key}"'
    try:
        tokens = tokenizer.encode(key)
    except ConfigError:
        tokens = []
    if len(tokens) == 1:
        return tokens[0]
    pieces = ", ".join(repr(tokenizer.id_to_token(token)) for token in tokens)
    what = f"{len(tokens)} tokens ({pieces})" if tokens else "no token of the tokenizer"
    raise ConfigError(f"{key!r} is {what}", fix=fix)
