"""A folder that comes out, uploaded to the Hugging Face hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError

from pi_compile.checkpoint.folder import CLIENT_ERROR
from pi_runtime.errors import InputError


def check_login(repository: str) -> None:
    """Check before a training that its result can be uploaded. Raises InputError where the hub knows nobody."""
    with _faults(repository, "hf auth login, or set HF_TOKEN"):
        HfApi().whoami()


def push(folder: Path, repository: str) -> str:
    """Upload a folder with its card to a repository, private if it is new; return its address. Raises InputError."""
    with _faults(repository, f"{folder} is whole: hf upload {repository} {folder}"):
        api = HfApi()
        found = api.create_repo(repository, private=True, exist_ok=True)
        message = "Made sparse by pi-compile sparsify"
        api.upload_folder(repo_id=found.repo_id, folder_path=folder, commit_message=message)
    return str(found)


@contextmanager
def _faults(repository: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except (OSError, HFValidationError, CLIENT_ERROR) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"{repository}: the hub does not take it", found=reason, remedy=remedy) from None
