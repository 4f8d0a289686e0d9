"""Models of the Hugging Face hub: download the files that serving needs, once, into the hub's own cache. No jax.

`huggingface_hub` does the work, so its settings apply: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE. A broken
connection or an interrupted download of weights is resumed where it stopped (`partial_files`).
"""

import contextlib
import dataclasses
import errno
import json
import pathlib
import re
import shutil
from collections.abc import Iterator, Sequence

from jaxserve.errors import CheckpointError
from jaxserve.loading import partial_files
from jaxserve.loading.causality import check_causal
from jaxserve.loading.json_files import read_config
from jaxserve.loading.model_types import check_model_type, is_unknown
from jaxserve.loading.partial_files import no_bar
from jaxserve.loading.pickles import why_not_read

SMALL_FILES = (
    *("config.json", "generation_config.json", "model.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model"),
    *("*quant*.json", "smash_config.json", "adapter_config.json"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
)
"""Patterns of the files besides weights that serving reads from a repository's top folder."""

_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:/(?P<file>[^@]+\.gguf))?(?:@(?P<revision>[^@]+))?", re.ASCII
)
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


@dataclasses.dataclass(frozen=True)
class HubName:
    """A model of the hub: "org/name", or "org/name/file.gguf", each with an optional "@" and a branch, tag or
    commit.
    """

    repo: str
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo + (f"/{self.file}" if self.file else "") + (f"@{self.revision}" if self.revision else "")


def parse_name(name: str) -> HubName | None:
    """Parse `name` as a model of the hub. Returns None if it cannot be one, such as a path that begins with ".", "~" or
    "/".
    """
    match = _NAME.fullmatch(name)
    return None if match is None else HubName(**match.groupdict())


def download(name: HubName, *, with_weights: bool = True, progress: bool = True, is_offline: bool = False) -> str:
    """Return the local directory or GGUF file of a model, after downloading what is not cached yet.

    The weights are `model.safetensors`, or the files named in `model.safetensors.index.json`; without weights, only
    config and tokenizer are downloaded. `is_offline` uses the cache only. Raises CheckpointError if there is no such
    model, or it cannot be reached.
    """
    from jaxserve.loading.quantization_files import stored_formats  # imported late, as it needs NumPy

    with _explained(name):
        if name.file is not None:
            return _gguf_file(name, name.file, progress=progress, is_offline=is_offline)
        folder = _snapshot(name, SMALL_FILES, ignored="*/*", is_offline=is_offline)
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{name.repo} has no config.json{_there_are(name, '.gguf')}")
        fields = read_config(folder / "config.json")
        # All of this before the weights are downloaded.
        if with_weights:
            check_model_type(fields, f"{name.repo}/config.json")
        if not is_unknown(fields):
            stored_formats(folder, fields)
            check_causal(fields)
            _add_modules(name, folder, is_offline=is_offline)
        if with_weights:
            commit = dataclasses.replace(name, revision=folder.name)
            _add_weights(commit, folder, progress=progress, is_offline=is_offline)
        return str(folder)


def _add_modules(name: HubName, folder: pathlib.Path, *, is_offline: bool) -> None:
    """Download the modules of sentence-transformers, which make embeddings or scores, and templates for pairs."""
    from jaxserve.loading.sentence_transformers import module_folders  # imported late, as it needs NumPy

    commit = dataclasses.replace(name, revision=folder.name)
    files = [f"{each}/{file}" for each in module_folders(folder) for file in ("config.json", "model.safetensors")]
    if files:
        _snapshot(commit, [*files, "additional_chat_templates/*.jinja"], is_offline=is_offline)


def _add_weights(commit: HubName, folder: pathlib.Path, *, progress: bool, is_offline: bool) -> None:
    """Download what is missing of a snapshot. `commit` keeps it consistent even if its branch moves meanwhile."""
    files = _weight_files(folder)
    missing = [file for file in files if not (folder / file).is_file()]
    if not missing:
        return
    if is_offline:
        raise CheckpointError(
            f"the cache does not hold all of {commit.repo}: {', '.join(missing)} would have to be downloaded"
        )
    _fetch(commit, files, progress=progress)
    _snapshot(commit, files)
    if not any((folder / file).is_file() for file in files):
        instead = _there_are(commit, ".bin") or _there_are(commit, ".gguf")
        raise CheckpointError(f"{commit.repo} has no safetensors{instead}")


def _gguf_file(name: HubName, file: str, *, progress: bool, is_offline: bool = False) -> str:
    """Return the path of a GGUF file; if it is one of several parts, the others are downloaded next to it."""
    part = _SPLIT.search(file)
    files = f"{file[: part.start()]}-*-of-{part[1]}.gguf" if part else file
    if not is_offline:
        _fetch(name, [files], progress=progress)
    path = _snapshot(name, [files], is_offline=is_offline) / file
    if not path.is_file():
        raise CheckpointError(f"{name.repo} has no {file}{_there_are(name, '.gguf')}")
    return str(path)


def _snapshot(
    name: HubName, files: Sequence[str], *, ignored: str | None = None, is_offline: bool = False
) -> pathlib.Path:
    from huggingface_hub import snapshot_download  # takes a third of a second to import

    folder = snapshot_download(
        name.repo,
        revision=name.revision,
        allow_patterns=list(files),
        ignore_patterns=ignored,
        local_files_only=is_offline,
        tqdm_class=no_bar(),
    )
    return pathlib.Path(folder)


def _weight_files(folder: pathlib.Path) -> list[str]:
    """Return the files that loading will open. An unreadable index is reported by the loader."""
    with contextlib.suppress(OSError, ValueError, LookupError, AttributeError, TypeError):
        weight_map = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
        return sorted({file for file in weight_map.values() if isinstance(file, str)})
    return ["model.safetensors"]


def _fetch(name: HubName, files: Sequence[str], *, progress: bool) -> None:
    """Download the contents of files that are not cached. Raises CheckpointError if the disk has no room for them."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import DryRunError

    try:
        found = snapshot_download(
            name.repo, revision=name.revision, allow_patterns=list(files), dry_run=True, tqdm_class=no_bar()
        )
    except DryRunError:  # without a network; the snapshot itself reports what is missing
        return
    missing = [file for file in found if file.will_download]
    needed = sum((file.file_size or 0) - partial_files.partial_bytes(name.repo, file.filename) for file in missing)
    free = shutil.disk_usage(constants.HF_HUB_CACHE).free
    if needed > free:
        raise CheckpointError(
            f"{name.repo} needs {needed / 2**30:.1f} GiB more in {constants.HF_HUB_CACHE}, where "
            f"{free / 2**30:.1f} GiB are free: HF_HOME names another place"
        )
    if missing:
        names = [file.filename for file in missing]
        partial_files.fetch(name.repo, names, commit=missing[0].commit_hash, progress=progress)


def _there_are(name: HubName, suffix: str) -> str:
    """Return what the repository has instead, as ", only a.gguf, b.gguf"; empty if there is nothing or it is
    unknown.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        files = [file for file in HfApi().list_repo_files(name.repo, revision=name.revision) if file.endswith(suffix)]
    except (OSError, OfflineModeIsEnabled):
        return ""
    if not files:
        return ""
    if suffix == ".gguf":
        return f", but GGUF files: name one of them, such as {name.repo}/{files[0]}"
    return f", but pickled weights ({files[0]}), {why_not_read(name.repo)}"


@contextlib.contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Turn every error of a download into a CheckpointError of one line."""
    from huggingface_hub import constants, errors

    where = f"{constants.ENDPOINT}/{name.repo}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(f"{name.repo} is gated: ask for access at {where}, and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"no model {name.repo!r}: there is no such path, and {where} does not exist, or is private and HF_TOKEN is "
            "not set to a token that may read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{name.repo} has no revision {name.revision!r}") from error
    except errors.LocalEntryNotFoundError as error:
        absent = f"there is no path {name}, and no whole model of that name in the cache"
        if constants.HF_HUB_OFFLINE or error.__cause__ is None:
            raise CheckpointError(f"{absent}; HF_HUB_OFFLINE forbids a download") from error
        raise CheckpointError(f"{absent}; {where} cannot be reached: {_first_line(error.__cause__)}") from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{name.repo!r} is no id of the hub: {_first_line(error)}") from error
    except (OSError, errors.HTTPError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise CheckpointError(f"no space left in {constants.HF_HUB_CACHE}: HF_HOME names another place") from error
        raise CheckpointError(f"cannot download {name} from {constants.ENDPOINT}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
