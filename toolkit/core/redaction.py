"""Safe output: `redact` removes secrets, and `visible` escapes control characters.

As a program, it does both to the output of a node's ranks.

Standard library only, and little of it: `python -I -S redaction.py` is one process for each node, and outlives its ranks: the
last words of a killed rank are kept.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any, TextIO

MARK = "[redacted]"
"""Replacement of a secret."""

LEAST = 8
"""Characters of the shortest value that counts as a secret: `true` and `1` are none."""

_SECRET = re.compile(r"(?:TOKEN|API_?KEY|ACCESS_KEY(?:_ID)?|PRIVATE_KEY|PASSPHRASE)$|SECRET|PASSWORD|PASSWD")
_PLACE = re.compile(r"(?:FILE|PATH|DIR)$")
_LEAVES = (str, float, int, type(None))
_TOKEN_NAME = "TOOLKIT_RUN_TOKEN"  # names a run's processes, and opens nothing

_VALUE = r"[^\s\"'\\,;&<>]{8,}"
# The text before a telling word has a limit: without one the time grows with the square of some texts.
_SECRET_SHAPES = tuple(
    (re.compile(pattern), shown)
    for pattern, shown in (
        # By their beginnings: Hugging Face, GitHub, GitLab, AWS, Slack, Weights & Biases, OpenAI and others.
        (r"(?<![A-Za-z0-9])(?:hf|api_org|gh[opsur])_[A-Za-z0-9]{20,}", MARK),
        (r"(?<![A-Za-z0-9])(?:github_pat_|wandb_v1_|glpat-|xox[abprs]-|sk-)[\w-]{20,}", MARK),
        (r"(?<![A-Za-z0-9])A[KS]IA[0-9A-Z]{16}(?![0-9A-Za-z])", MARK),
        # By what stands before them: a header, a key of 40 digits, an assignment in a shell, a query's signature.
        (r"((?i:bearer)[ \t]+)[\w.~+/=-]{8,}", rf"\1{MARK}"),
        (r"((?i:authorization)\W{1,6}\w+[ \t]+)" + _VALUE, rf"\1{MARK}"),
        (r"((?i:key)[\"']?\s?[=:]\s?[\"']?)[0-9a-f]{40}(?![0-9a-f])", rf"\1{MARK}"),
        (r"((?:TOKEN|API_KEY|ACCESS_KEY|SECRET|PASSWORD)[\"']?\s?[=:]\s?[\"']?)" + _VALUE, rf"\1{MARK}"),
        (r"([?&][\w-]{0,40}(?i:token|key|secret|password|signature|credential)[\w-]{0,40}=)" + _VALUE, rf"\1{MARK}"),
        # A user in an address: with a password anywhere, alone in http's, where it is a token.
        (r"(://)[^\s/\"'\\@:]{0,256}:[^\s/\"'\\]{1,1024}@", rf"\1{MARK}@"),
        (r"(https?://)[^\s/\"'\\@]{1,1024}@", rf"\1{MARK}@"),
    )
)


_OBEYED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab, newline and return, what turns the direction of writing (Unicode's bidi controls), surrogates."""

_MOVES = re.compile(r"\x1b\[[0-9;]{0,16}[AKm]")
"""Control sequences of progress bars: a line up, the rest of a line erased, a colour."""


def visible(text: str, *, moves: bool = False) -> str:
    """Return `text` with control characters escaped: a model's name could rewrite the terminal or the clipboard.

    Args:
        moves: leave a progress bar's own sequences: for streams of a whole program. Elsewhere they are taken out.
    """
    if not moves:
        return _OBEYED.sub(_escape, _MOVES.sub("", text)).replace("\r", "\\r")
    texts, sequences = _MOVES.split(text), _MOVES.findall(text)
    # Above are bytes of other encodings than UTF-8, which no terminal obeys.
    parts = [_OBEYED.sub(lambda match: match[0] if match[0] >= "\udca0" else _escape(match), part) for part in texts]
    return "".join(part + move for part, move in zip(parts, [*sequences, ""], strict=True))


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def redact(text: str) -> str:
    """Return `text` with `[redacted]` in place of every secret.

    Secrets are the values of environment variables with a telling name (`HF_TOKEN`, `*_API_KEY`, `*SECRET*`, `*PASSWORD*`, …;
    at least 8 characters), the Hub's token file, passwords in `.netrc`, and what has the shape of a well-known token.
    """
    return _redacted(text, _secrets_pattern())


def shorten(text: str, most: int = 20_000) -> str:
    """Return a text, or the beginning and the end of a long one, redacted: a view waits for no megabytes."""
    if len(text) <= most:
        return redact(text)
    ends = redact(text[: 2 * most])[: most // 2], redact(text[-2 * most :])[-most // 2 :]  # no half of a secret
    return f"\n… {len(text):,} characters …\n".join(ends)


def redact_all(value: Any) -> Any:
    """Return JSON containers with every string redacted, except for keys."""
    secrets = _secrets_pattern()
    return map_leaves(value, lambda leaf: _redacted(leaf, secrets) if isinstance(leaf, str) else leaf)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return JSON containers with every value in them changed, except for keys."""
    if isinstance(value, _LEAVES):  # most are, and looking for a Mapping takes long
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_leaves(item, change) for key, item in value.items()}
    return [map_leaves(item, change) for item in value] if isinstance(value, list | tuple) else change(value)


@contextlib.contextmanager
def redacted_output() -> Iterator[None]:
    """Redact Python's standard output and error meanwhile, write by write."""
    out, err = _Stream(sys.stdout), _Stream(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


class _Stream:
    """A text stream that redacts everything written to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(visible(redact(text), moves=True))
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _redacted(text: str, secrets: re.Pattern[str] | None) -> str:
    if secrets is not None:
        text = secrets.sub(MARK, text)
    for pattern, replacement in _SECRET_SHAPES:
        text = pattern.sub(replacement, text)
    return text


def _secrets_pattern() -> re.Pattern[str] | None:
    """Return one pattern for all secrets that this process knows now."""
    named = [os.environ[name] for name in os.environ if _is_secret_name(name)]
    home, cache = os.path.expanduser("~"), os.environ.get("XDG_CACHE_HOME")
    hub = os.environ.get("HF_HOME") or os.path.join(cache or os.path.join(home, ".cache"), "huggingface")
    tokens = _read_secrets(os.environ.get("HF_TOKEN_PATH") or os.path.join(hub, "token"), r"(\S+)")
    passwords = _read_secrets(os.environ.get("NETRC") or os.path.join(home, ".netrc"), r"\bpassword\s+(\S+)")
    return _pattern((*named, *tokens, *passwords))


@lru_cache(maxsize=1024)
def _is_secret_name(name: str) -> bool:
    """Return whether a variable of this name holds a secret. Called for the whole environment at every written line."""
    upper = name.upper()
    return _SECRET.search(upper) is not None and _PLACE.search(upper) is None and upper != _TOKEN_NAME


@lru_cache(maxsize=8)
def _read_secrets(path: str, pattern: str) -> tuple[str, ...]:
    """Read once: a process's secrets stay what they are."""
    try:
        with open(path, encoding="utf-8") as file:
            return tuple(re.findall(pattern, file.read()))
    except (OSError, UnicodeDecodeError):
        return ()


@lru_cache(maxsize=8)
def _pattern(values: tuple[str, ...]) -> re.Pattern[str] | None:
    """Return a pattern of the secrets, longest first, by line, and in the spellings of JSON, HTML and URLs."""
    lines = {line.strip() for value in values for line in value.splitlines()}
    secrets = {spelling for line in lines if len(line) >= LEAST for spelling in (line, *_spellings(line))}
    ordered = sorted(secrets, key=lambda word: (-len(word), word))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _spellings(word: str) -> tuple[str, ...]:
    if re.fullmatch(r"[\w.~-]+", word, re.ASCII):
        return ()
    import json
    from html import escape
    from urllib.parse import quote

    plain, wide = json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1]
    html = escape(word)
    by_jinja = html.replace("&quot;", "&#34;").replace("&#x27;", "&#39;")
    return plain, wide, repr(word)[1:-1], html, by_jinja, quote(word, safe="")


# As a program ----------------------------------------------------------------------------------------------------------

QUIET_SECONDS = 0.1
"""Seconds after which an unfinished line is passed on: a bar's state, a prompt."""

_LONGEST_UNFINISHED = 2**20


FIRST_RANK_SECONDS = 60.0
"""Time limit for the first rank. Afterwards the process ends with the last one."""


def copy(source: int, targets: Sequence[int]) -> None:
    """Copy one file descriptor to others until it ends, by line; a failing one stops no other."""
    import select

    secrets, pending = _secrets_pattern(), b""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")  # keeps a character that arrives in two parts

    def pass_on(data: bytes) -> None:
        text = visible(_redacted(decoder.decode(data), secrets), moves=True)
        for target in targets:
            with contextlib.suppress(OSError):
                _write(target, text.encode("utf-8", "surrogateescape"))

    while True:
        if not select.select([source], [], [], QUIET_SECONDS if pending else None)[0]:
            pass_on(pending)
            pending = b""
            continue
        data = os.read(source, 2**16)
        if not data:
            break
        pending += data
        end = max(pending.rfind(b"\n"), pending.rfind(b"\r")) + 1
        if not end and len(pending) > _LONGEST_UNFINISHED:
            end = pending.rfind(b" ") + 1 or len(pending)
        if end:
            pass_on(pending[:end])
            pending = pending[end:]
    pass_on(pending)


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


def serve() -> None:
    """Copy every stream that a rank hands over at the socket on standard input; end with the last stream.

    A message holds the file descriptors of a source and its targets, and is answered by a byte. A thread copies each
    source, so that one reader who waits stops no other rank. The connection ends once everything is written.
    """
    import socket
    import threading

    listener, lock, active = socket.socket(fileno=0), threading.Lock(), 0
    listener.settimeout(FIRST_RANK_SECONDS)

    def pass_through(connection: socket.socket, source: int, *targets: int) -> None:
        nonlocal active
        copy(source, targets)
        for descriptor in (source, *targets):
            os.close(descriptor)
        with lock:
            active -= 1
            connection.close()
            if not active:
                os._exit(0)

    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            with lock:
                if not active:
                    return
            continue
        descriptors = socket.recv_fds(connection, 1, 8)[1] if is_own(connection) else []
        if not descriptors:
            connection.close()
            continue
        with lock:
            active += 1
        with contextlib.suppress(OSError):  # the rank was killed: its last words are in the pipe
            connection.send(b"+")
        threading.Thread(target=pass_through, args=(connection, *descriptors), daemon=True).start()


def is_own(connection: socket.socket) -> bool:
    """Return whether the other end of a Unix socket is a process of this user (SO_PEERCRED: pid, uid, gid)."""
    import socket
    import struct

    size = struct.calcsize("3i")
    uid: int = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
    return uid == os.getuid()


if __name__ == "__main__":
    serve()
