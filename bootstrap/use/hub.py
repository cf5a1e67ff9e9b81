"""Publishing an export: a folder as one commit of a model on the Hugging Face hub, or on any server that speaks as it.

`HF_TOKEN`, or what `hf auth login` left, is the key, and `HF_ENDPOINT` another server, as for all programs of the hub.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined] # its types forget it

from dipaco_p2p.errors import ConfigError, DipacoError, Unreachable

from .card import HUB_NAME


class Hub:
    """A model on the hub, to which this user may write; nothing is sent before `push`. Raises ConfigError for a wrong
    name, or without a token."""

    def __init__(self, name: str) -> None:
        if not HUB_NAME.fullmatch(name):
            raise ConfigError(
                f"`--push {name}` is not the name of a model on the hub", hint="write it like --push my-org/my-model"
            )
        token = huggingface_hub.get_token()
        if token is None:
            hint = "set HF_TOKEN to one that may write, or run `hf auth login`"
            raise ConfigError(f"no token of the hub to push {name} with", hint=hint)
        self._name = name
        self._api = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)

    def push(self, folder: Path) -> str:
        """Put what is in `folder` there, as one commit, and make the model if it is not there; the commit's address.
        Raises ConfigError if the hub refuses, and Unreachable."""
        if not sys.stderr.isatty():
            disable_progress_bars()
        try:
            self._api.create_repo(self._name, exist_ok=True)
            return str(self._api.upload_folder(repo_id=self._name, folder_path=folder).commit_url)
        except Exception as error:  # of the library, of what it is built on, or of what it wraps these in
            raise self._problem(error, folder) from None

    def _problem(self, error: Exception, folder: Path) -> DipacoError:
        cause: BaseException = error  # the outermost says no more than which file it was
        while cause.__cause__ is not None and not isinstance(cause, HfHubHTTPError):
            cause = cause.__cause__
        hint = f"nothing is lost: `hf upload {self._name} {folder}` tries again"
        if isinstance(cause, HFValidationError):
            return ConfigError(str(cause), hint=hint)
        if isinstance(cause, HfHubHTTPError) and cause.response.status_code < 500:
            said = cause.server_message or f"it answered {cause.response.status_code}"
            return ConfigError(f"the hub refuses {self._name}: {said}", hint=hint)
        said = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        return Unreachable(f"{self._name} cannot be pushed to {self._api.endpoint}: {said}", hint=hint)
