"""Uploading a model folder to the Hugging Face hub, never without being asked."""

import json
from pathlib import Path

from wide_jax.hf.config import read_config, read_json
from wide_jax.hf.load import find_weights
from wide_jax.hf.peft import ADAPTER_CONFIG
from wide_jax.hf.wide_folder import base_folder, is_wide_folder, load_wide_info, load_wide_routers


def push_to_hub(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = True,
    message: str = "Upload model",
    token: str | None = None,
) -> str:
    """Check a model folder and upload all of it; returns the address of the commit.

    Args:
        folder: As `save_model` or `save_wide_model` wrote it.
        repo_id: `owner/name`; made if it does not exist.
        private: Of a repository that is made by this call.
        message: Of the commit.
        token: None: the one that `hf auth login` stored.

    Raises:
        ConfigError, CheckpointError, WideConfigError: the folder is not a whole model.
        ValueError: the folder holds only the deltas to a base elsewhere.
    """
    folder = Path(folder)
    if base_folder(folder) != folder:
        raise ValueError(f"{folder} names its base by a path; export it with the base first")
    config = read_config(folder)
    find_weights(folder, config)
    if is_wide_folder(folder):
        load_wide_routers(folder, config, load_wide_info(folder, config).wide)
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    done = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        commit_message=message,
        ignore_patterns=[ADAPTER_CONFIG],
    )
    if (folder / ADAPTER_CONFIG).exists():  # its base is the repository now, not a folder here
        entries = read_json(folder / ADAPTER_CONFIG) | {"base_model_name_or_path": repo_id}
        done = api.upload_file(
            repo_id=repo_id,
            path_in_repo=ADAPTER_CONFIG,
            path_or_fileobj=json.dumps(entries, indent=2).encode(),
            commit_message=message,
        )
    return done.commit_url
