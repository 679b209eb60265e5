"""What is taken for a secret in a file that is kept, and what is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.runs.secrets import find_secret, is_secret_name


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "PASSWORD_FILE_TEXT", "SLURM_JWT", "api_key"],
)
def test_names_that_people_keep_tokens_under(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "pad_token",
        "EOS_TOKEN",
        "special_tokens",
        "sort_key",
        "TOKENIZERS_PARALLELISM",
        "PATH",
        "MONKEY",
        "HF_TOKEN_PATH",
        "KEYBOARD",
        "OMP_NUM_THREADS",
        "tokens_per_s",
    ],
)
def test_names_that_only_look_alike(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("export HF_TOKEN=hf_abcdefgh", "HF_TOKEN"),
        ("module load cuda; WANDB_API_KEY='0123456789abcdef' python x.py", "WANDB_API_KEY"),
        ('export DB_PASSWORD="correct horse"', "DB_PASSWORD"),
        ("wandb login --api-key 0123456789", "an option that takes a token or password"),
        ("huggingface-cli login --token=abc", "an option that takes a token or password"),
        ("export https_proxy=http://me:pass@proxy:3128", "an address with a password"),
        ("git clone https://me:glpat-abc@git.example.org/x", "an address with a password"),
        ("echo hf_" + "a1" * 17, "a token"),
        ("vault login hvs." + "a1" * 12, "a token"),
        ("docker login -p dckr_pat_" + "a1" * 13, "a token"),
        ("echo ASIA" + "A1" * 8, "a token"),
        ("npm_" + "a1" * 18, "a token"),
        ("curl https://hooks.slack.com/services/T0/B0/xyz", "a webhook's address"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", "a private key"),
    ],
)
def test_a_secret_in_a_line_is_named_and_not_repeated(text: str, found: str) -> None:
    assert find_secret(text) == found


@pytest.mark.parametrize(
    "text",
    [
        "module load cuda/12.4",
        "source ~/venv/bin/activate",
        "export HF_TOKEN=$(cat ~/.cache/token)",
        'export HF_TOKEN="$MY_TOKEN"',
        "export HF_TOKEN=",
        "export HF_TOKEN_PATH=/home/me/token",
        "export SSL_KEY=/etc/ssl/me.key",
        "export NUM_KEYS=8",
        "export TOKENIZERS_PARALLELISM=false",
        "export http_proxy=http://proxy:3128",
        "export http_proxy=http://$USER:$PASS@proxy:3128",
        "hf download --token $HF_TOKEN x",
        "sort --key=1234567 file",
        "--constraint=gpu&ib",
        "/data/my-token-shards",
    ],
)
def test_a_line_without_a_secret_is_left_alone(text: str) -> None:
    assert find_secret(text) is None


@given(st.text())
def test_any_text_is_looked_at(text: str) -> None:
    assert find_secret(text) is None or find_secret(text) not in ("",)


@given(st.from_regex(r"[A-Za-z0-9]{6,40}", fullmatch=True))
def test_a_value_written_out_under_such_a_name_is_found_whatever_it_is(value: str) -> None:
    assert find_secret(f"export SOME_TOKEN={value}") == "SOME_TOKEN"
