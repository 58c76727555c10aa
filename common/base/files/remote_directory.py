"""Files below a URL of any kind that fsspec knows. Every call blocks, as long as its server takes.

Credentials are those that the client of its kind finds in this process's environment and files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshrl.common.base.errors import ConfigError, MeshError, NotFound
from meshrl.common.base.urls import Url

PART_SUFFIX = ".part"  # ends the name of a file that is being written


class RemoteDirectory:
    """What lies at a URL. Its errors are NotFound for what is not there, and MeshError, which names
    the URL without the secrets in it.
    """

    def __init__(self, url: str, setting: str, description: str, writer_id: str = "") -> None:
        """`key`: the setting that names it, and `what` it is, for errors. `writer`: whose the
        halves of files are, where several may write there. ConfigError for a URL of a kind that is
        not known here, and for a chain of them.
        """
        if "::" in url:  # whose secrets could be anywhere in it: it is shown to nobody
            raise ConfigError(
                "a URL with :: in it, a chain of fsspec's, is no place to write to",
                where=setting,
                fix="Name the place itself: s3://BUCKET/PATH, gs://, file:///DIRECTORY, ...",
            )
        if url.startswith("://"):  # which would be a path with an odd name
            raise ConfigError(
                f"{redact_url(url)} is a URL of no kind",
                where=setting,
                fix="Take s3://BUCKET/PATH, gs://, file:///DIRECTORY, ...",
            )
        import fsspec  # nobody else needs it, and it takes a while

        self.public_url, self._description, self._url = redact_url(url), description, Url.parse(url)
        self._part_suffix = f".{writer_id}{PART_SUFFIX}" if writer_id else PART_SUFFIX
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError(
                f"{self.public_url} is no URL that can be written to: "
                f"{self._url.redact(str(error))}",
                where=setting,
                fix="Take s3://BUCKET/PATH, gs://, file:///DIRECTORY, ..., and install what the "
                "error names",
            ) from error

    def read_file(self, name: str) -> bytes:
        """What a file holds."""
        with self._translate_errors(name):
            return bytes(self._fs.cat_file(self._path(name)))

    def write_file(self, name: str, content: bytes) -> None:
        """Puts a file in place of what is there."""
        self._write_atomically(name, lambda path: self._fs.pipe_file(path, content))

    def upload_file(self, name: str, path: Path) -> None:
        """Puts a copy of a file of this host there."""
        self._write_atomically(name, lambda there: self._fs.put_file(str(path), there))

    def fetch_file(self, name: str, path: Path) -> None:
        """Copies a file from there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._translate_errors(name):
            self._fs.get_file(self._path(name), str(path))

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with all that is below it, if it is there."""
        # `exists` would take an error for "not there"
        with self._translate_errors(name), suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)

    def list_names(self, below: str) -> list[str]:
        """Names of files and folders of a folder; none of one that is not there."""
        folder, found = self._path(below).rstrip("/"), []
        # `isdir` would take any error for "not there"
        with self._translate_errors(below), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            found = [str(path).rstrip("/") for path in self._fs.ls(folder, False)]
        return sorted(path.rpartition("/")[2] for path in found if path != folder)

    def list_file_sizes(self) -> dict[str, int]:
        """The bytes of every file, by its path below the URL."""
        root = self._root.rstrip("/")
        with self._translate_errors(""):
            self._fs.invalidate_cache()
            try:
                self._fs.ls(root, False)
            except FileNotFoundError:
                return {}
            return {path[len(root) + 1 :]: size for path, size in self._walk_files(root)}

    def _walk_files(self, folder: str) -> Iterator[tuple[str, int]]:
        """Files, where `find` would leave out those of a folder that cannot be listed."""
        for about in self._fs.ls(folder, True):
            path = str(about["name"]).rstrip("/")
            if path == folder:  # as a bucket marks one
                continue
            if about["type"] != "directory":
                yield path, int(about["size"])
            else:
                yield from self._walk_files(path)

    def _write_atomically(self, name: str, put: Callable[[str], object]) -> None:
        """Has `put` write a file elsewhere, which then takes its name: a full disk or an end in the
        middle leaves no half of it there.
        """
        path = self._path(name)
        with self._translate_errors(name):
            try:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            except FileNotFoundError as error:  # of a place that takes no folder, as /proc
                raise OSError(f"no folder can be made there: {error}") from error
            put(f"{path}{self._part_suffix}")
            self._fs.mv(f"{path}{self._part_suffix}", path)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextmanager
    def _translate_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise NotFound("it is missing", where=f"{self.public_url}/{name}") from None
        except MeshError:
            raise
        except Exception as error:  # each kind of URL has errors of its own
            raise MeshError(
                f"{self._description} cannot be reached: {type(error).__name__}: "
                f"{self._url.redact(str(error))}",
                where=f"{self.public_url}/{name}",
                fix="See that the URL can be written to with this host's credentials",
            ) from error


def is_url(text: str) -> bool:
    """Whether a text names a URL, and no path."""
    return "://" in text


def redact_url(url: str) -> str:
    """The URL without a user's name and password, and without a query, which may be a signature."""
    return Url.parse(url).public_url.rstrip("/")
