"""URLs that may contain secrets: their public parts, and redaction of secrets in other texts.

A URL is split as its clients split it (`urllib.parse`). A URL that its author may have meant
otherwise, such as one with an unescaped slash in the password, is ambiguous. Of such a URL only the
part after its last @ is public.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, quote, unquote, unquote_plus, urlsplit

REDACTED = "***"
REDIS_SCHEMES = ("redis", "rediss", "unix")  # schemes of a Redis
WEB_SCHEMES = (
    "http",
    "https",
)  # schemes whose fragments may be tokens; in others they belong to the path
# Options of a Redis URL without secrets, and the characters of their values.
PUBLIC_OPTIONS = {
    "db",
    "protocol",
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_cert_reqs",
    "ssl_check_hostname",
}
PLAIN_CHARS = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~/%+")
MIN_SECRET_CHARS = 3  # shorter secrets occur in every text, so they are not redacted


@dataclass(frozen=True, repr=False)
class Url:
    """URL as its clients split it; `host` is HOST:PORT, `credentials` are USER:PASSWORD.

    Of an ambiguous URL `credentials` is everything up to its last @, or everything if it has none,
    and `host` the rest.
    """

    scheme: str
    credentials: str
    host: str
    path: str = ""
    query: str = ""
    fragment: str = ""
    is_ambiguous: bool = False

    @classmethod
    def parse(cls, text: str) -> Url:
        """Split a text; one that is no URL has no scheme."""
        scheme, mark, rest = text.partition("://")
        if not mark:
            scheme, rest = "", text
        parts = _split_unambiguous(scheme, rest)
        if parts is None:
            credentials, at, host = rest.rpartition("@")
            return cls(scheme, credentials if at else rest, host if at else "", is_ambiguous=True)
        credentials, _, host = parts.netloc.rpartition("@")
        return cls(scheme, credentials, host, parts.path, parts.query, parts.fragment)

    @property
    def hostname(self) -> str:
        """Host without its port; empty if there is none."""
        return "" if self.is_ambiguous else urlsplit(f"none://{self.host}").hostname or ""

    @property
    def public_url(self) -> str:
        """URL without credentials and options."""
        if self.is_ambiguous:
            return self._public_part.public_url
        belongs = self.fragment and self.scheme not in (*WEB_SCHEMES, *REDIS_SCHEMES)
        fragment = f"#{self.fragment.partition('?')[0]}" if belongs else ""
        return f"{self._scheme_prefix}{self.host}{self.path}{fragment}"

    @property
    def redacted_redis_url(self) -> str:
        """URL of a Redis with its user, its database and its options without secrets."""
        if self.is_ambiguous:
            return self._public_part.redacted_redis_url
        user, colon, _ = self.credentials.partition(":")
        who = f"{user}:{REDACTED}@" if colon else f"{user}@" if user else ""
        database = self.path.strip("/")
        known = self.scheme == "unix" or not database or database.isdecimal()
        path = self.path if known else f"/{REDACTED}"
        options = "&".join(map(_redact_option, self.query.split("&"))) if self.query else ""
        mark = f"#{REDACTED}" if self.fragment else ""
        return f"{self._scheme_prefix}{who}{self.host}{path}{'?' if options else ''}{options}{mark}"

    def redact(self, text: str) -> str:
        """Return another text, such as a client's error, without the URL's secrets."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, REDACTED)
        return text

    @property
    def _scheme_prefix(self) -> str:
        return f"{self.scheme}://" if self.scheme else ""

    @property
    def _public_part(self) -> Url:
        """Certainly public part of an ambiguous URL."""
        rest = Url.parse(f"{self._scheme_prefix}{self.host}")
        if rest.is_ambiguous:
            return Url(self.scheme, "", REDACTED)
        host = f"{REDACTED}@{rest.host}" if rest.host else REDACTED
        return Url(self.scheme, "", host, rest.path, rest.query, rest.fragment)

    @property
    def _secrets(self) -> set[str]:
        user, colon, password = self.credentials.partition(":")
        options = [piece for piece in self.query.split("&") if _redact_option(piece) != piece]
        parts = {self.credentials, password if colon else user, self.fragment, *options}
        parts |= {piece.partition("=")[2] for piece in options}
        if len(options) == self.query.count("&") + 1:
            parts.add(self.query)
        if self.is_ambiguous:
            parts |= {part for mark in "/?#@:[]" for part in self.credentials.split(mark)}
        return {
            form
            for part in parts
            for form in _list_spellings(part)
            if len(form) >= MIN_SECRET_CHARS
        }


def _split_unambiguous(scheme: str, rest: str) -> SplitResult | None:
    """Split a URL into its parts; return None if it is ambiguous."""
    if any(mark < " " for mark in rest):  # some clients drop these characters
        return None
    try:
        parts = urlsplit(f"{scheme or 'none'}://{rest}")
        parts.port  # noqa: B018  # raises ValueError for no number
    except ValueError:
        return None
    if scheme and parts.scheme != scheme.lower():
        return None
    options = [piece for piece in parts.query.split("&") if not _is_known_option(piece)]
    behind = "@" in parts.path + parts.fragment + "".join(options)
    storage = scheme and scheme not in REDIS_SCHEMES and not {"@", ":"} & set(parts.netloc)
    return None if behind and parts.netloc and not storage else parts


def _is_known_option(piece: str) -> bool:
    """Return True if Redis clients accept an option: an @ in it ends no password."""
    name, equals, _ = piece.partition("=")
    return bool(equals) and unquote_plus(name) in {"username", "password", *PUBLIC_OPTIONS}


def _redact_option(piece: str) -> str:
    """Return an option of a Redis URL without secrets."""
    name, equals, value = piece.partition("=")
    if not equals:
        return REDACTED
    return piece if name in PUBLIC_OPTIONS and set(value) <= PLAIN_CHARS else f"{name}={REDACTED}"


def _list_spellings(part: str) -> set[str]:
    """Return the spellings of a part of a URL in other texts."""
    plain = unquote(part)
    return {part, plain, unquote_plus(part), quote(plain), quote(plain, safe=""), repr(plain)[1:-1]}
