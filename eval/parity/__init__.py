"""The same requests through the harness's own Hugging Face wrapper and through ours."""
