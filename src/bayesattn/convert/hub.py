"""Saved models on the Hugging Face Hub: one argument for a folder or a repository, and uploads.

`huggingface_hub` is imported only where a repository is meant. It stores downloads in its own cache, by commit.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bayesattn.optional import needs_extra

# the Hub's own rule, with the owner: a single word is more often a misspelled folder than a repository
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
# safetensors, JSON and text: whatever else is in the folder (pickles, optimizers, subfolders) stays there
UPLOADED = ("*.safetensors", "*.json", "*.txt", "*.md", "*.model", "*.jinja")


def is_repository(where: str | os.PathLike[str]) -> bool:
    """Whether `where` has the form `owner/name` of a repository."""
    return isinstance(where, str) and _REPOSITORY.fullmatch(where) is not None


def find_folder(
    where: str | os.PathLike[str],
    wanted: Sequence[Sequence[str]],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    endpoint: str | None = None,
) -> Path:
    """Return the folder itself, or the local copy of a repository; an existing folder wins, as in transformers.

    Args:
        where: A folder, or `owner/name` on the Hub.
        wanted: Groups of file patterns to fetch; a later group only if the repository lacks the first file of the earlier.
        revision: Branch, tag or commit of the repository.
        token: As for `huggingface_hub`.
        endpoint: As for `huggingface_hub`.

    Raises:
        ValueError: There is no such folder, or the repository cannot be fetched; the message says what was tried.
    """
    path = Path(where)
    if path.is_dir():
        if revision is not None:
            raise ValueError(
                f"revision is {revision!r}, but {str(where)!r} is a folder on this machine and has no revisions; "
                "leave revision out, or rename the folder if you mean the repository"
            )
        return path
    if not is_repository(where):
        raise ValueError(
            f"{str(where)!r} is not a folder on this machine, and a repository on the Hub is written 'owner/name'"
        )
    with needs_extra("loading from the Hugging Face Hub", "hf"):
        from huggingface_hub import snapshot_download
    repo_id, found = str(where), path
    for patterns in wanted:
        with _explained(repo_id, revision, endpoint, "read"):
            found = Path(
                snapshot_download(
                    repo_id,
                    revision=revision,
                    token=token,
                    endpoint=endpoint,
                    allow_patterns=list(patterns),
                    ignore_patterns="*/*",
                    library_name="bayesattn",
                )
            )
        if (found / patterns[0]).is_file():
            break
    return found


def push(
    folder: Path,
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    private: bool = True,
    endpoint: str | None = None,
) -> str:
    """Send the safetensors, JSON and text files of a folder to a repository; return the URL of the commit.

    Raises:
        ValueError: The Hub refused; the message says why.
    """
    with needs_extra("push_to_hub", "hf"):
        from huggingface_hub import HfApi
    api = HfApi(endpoint=endpoint, token=token, library_name="bayesattn")
    with _explained(repo_id, revision, endpoint, "write to"):
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            allow_patterns=list(UPLOADED),
            ignore_patterns="*/*",
            commit_message="Upload a model with its uncertainty",
        )
    return commit.commit_url


def check_repository(repo_id: str) -> None:
    """Raise unless the name has the form of a repository."""
    if not is_repository(repo_id):
        raise ValueError(f"push_to_hub must be the name of a repository, 'owner/name', got {repo_id!r}")


@contextmanager
def _explained(repo_id: str, revision: str | None, endpoint: str | None, deed: str) -> Iterator[None]:
    """Turn the exceptions of huggingface_hub into one ValueError that says what was tried and what to do."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = endpoint or constants.ENDPOINT
    login = "give token=, or log in once with `hf auth login`"
    try:
        yield
    except GatedRepoError as error:
        raise ValueError(f"{repo_id} on {hub} is gated; accept its terms on its page, then {login}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"there is no folder {repo_id!r} here, and {hub} has no such repository that you may {deed}; "
            f"check the name, and if it is private {login}"
            if deed == "read"
            else f"{hub} has no repository {repo_id} that you may {deed}. Check the name, and {login}"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(
            f"{repo_id} on {hub} has no revision {revision or 'main'!r}. Give a branch, a tag or a commit that it has"
        ) from error
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403):
            raise ValueError(f"{hub} did not let you {deed} {repo_id}. Use an account that may: {login}") from error
        raise ValueError(f"{hub} answered a request to {deed} {repo_id} with an error: {error}") from error
    except RuntimeError as error:  # huggingface_hub raises this for any error while it uploads a file
        raise ValueError(f"{error} {error.__cause__ or ''}".strip()) from error
    except (httpx.HTTPError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"there is no folder {repo_id!r} here, {hub} cannot be reached, and no copy of the repository is in the cache"
            if deed == "read"
            else f"{hub} cannot be reached to {deed} {repo_id}: {error}"
        ) from error
