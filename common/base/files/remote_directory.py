"""Files below a URL of any kind that fsspec supports. Every call blocks until the server answers.

Credentials come from this process's environment and files, as the client of each kind finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshrl.common.base.errors import ConfigError, MeshError, NotFound
from meshrl.common.base.urls import Url

PART_SUFFIX = ".part"  # suffix of a file that is being written


class RemoteDirectory:
    """Directory at a URL.

    Raises NotFound for missing files, and MeshError with the URL without its secrets.
    """

    def __init__(self, url: str, setting: str, description: str, writer_id: str = "") -> None:
        """Open a directory.

        Args:
            url: any URL of fsspec. ConfigError for an unknown kind, and for a chain of URLs.
            setting: setting that names the URL, for errors.
            description: description of the directory, for errors.
            writer_id: suffix of this writer's partial files, where several writers may write.
        """
        if "::" in url:  # its secrets could be anywhere, so the error does not show it
            raise ConfigError(
                "a URL with ::, an fsspec chain, cannot be written to",
                where=setting,
                fix="Set the target itself: s3://BUCKET/PATH, gs://, file:///DIRECTORY, ...",
            )
        if url.startswith("://"):  # it would be a path with an odd name
            raise ConfigError(
                f"{redact_url(url)} is a URL of no known scheme",
                where=setting,
                fix="Use s3://BUCKET/PATH, gs://, file:///DIRECTORY, ...",
            )
        import fsspec  # slow to import, and only used here

        self.public_url, self._description, self._url = redact_url(url), description, Url.parse(url)
        self._part_suffix = f".{writer_id}{PART_SUFFIX}" if writer_id else PART_SUFFIX
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ConfigError(
                f"{self.public_url} is not a writable URL: {self._url.redact(str(error))}",
                where=setting,
                fix="Use s3://BUCKET/PATH, gs://, file:///DIRECTORY, ..., and install the "
                "packages that the error names",
            ) from error

    def read_file(self, name: str) -> bytes:
        """Return the content of a file."""
        with self._translate_errors(name):
            return bytes(self._fs.cat_file(self._path(name)))

    def write_file(self, name: str, content: bytes) -> None:
        """Write a file, replacing an existing one."""
        self._write_atomically(name, lambda path: self._fs.pipe_file(path, content))

    def upload_file(self, name: str, path: Path) -> None:
        """Upload a copy of a local file."""
        self._write_atomically(name, lambda there: self._fs.put_file(str(path), there))

    def fetch_file(self, name: str, path: Path) -> None:
        """Download a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._translate_errors(name):
            self._fs.get_file(self._path(name), str(path))

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content, if it exists."""
        # `exists` would treat an error as a missing file.
        with self._translate_errors(name), suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)

    def list_names(self, below: str) -> list[str]:
        """Return the names of files and folders in a folder; empty for a missing folder."""
        folder, found = self._path(below).rstrip("/"), []
        # `isdir` would treat any error as a missing folder.
        with self._translate_errors(below), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            found = [str(path).rstrip("/") for path in self._fs.ls(folder, False)]
        return sorted(path.rpartition("/")[2] for path in found if path != folder)

    def list_file_sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file by its path below the URL."""
        root = self._root.rstrip("/")
        with self._translate_errors(""):
            self._fs.invalidate_cache()
            try:
                self._fs.ls(root, False)
            except FileNotFoundError:
                return {}
            return {path[len(root) + 1 :]: size for path, size in self._walk_files(root)}

    def _walk_files(self, folder: str) -> Iterator[tuple[str, int]]:
        """Yield files; `find` would omit those of a folder that cannot be listed."""
        for about in self._fs.ls(folder, True):
            path = str(about["name"]).rstrip("/")
            if path == folder:  # marker of a folder in a bucket
                continue
            if about["type"] != "directory":
                yield path, int(about["size"])
            else:
                yield from self._walk_files(path)

    def _write_atomically(self, name: str, put: Callable[[str], object]) -> None:
        """Write a file under another name with `put`, then rename it.

        A full disk or an exit in the middle leaves no partial file under `name`.
        """
        path = self._path(name)
        with self._translate_errors(name):
            try:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            except FileNotFoundError as error:  # a location without folders, such as /proc
                raise OSError(f"no folder can be created there: {error}") from error
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
        except Exception as error:  # each kind of URL raises different errors
            raise MeshError(
                f"{self._description} cannot be reached: {type(error).__name__}: "
                f"{self._url.redact(str(error))}",
                where=f"{self.public_url}/{name}",
                fix="Check that this host's credentials permit writes to the URL",
            ) from error


def is_url(text: str) -> bool:
    """Return True if a text is a URL, and no path."""
    return "://" in text


def redact_url(url: str) -> str:
    """Return the URL without user name, password and query, which may be a signature."""
    return Url.parse(url).public_url.rstrip("/")
