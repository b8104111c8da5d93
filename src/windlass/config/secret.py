"""What counts as a secret, by its name or by its form: the one rule for recipes, job scripts, logs and reports."""

import re

HIDDEN = "(hidden)"
_NAME = re.compile(
    r"(api_?key|secret|passw(or)?d|credential|private_?key|access_?key|auth_?token|bearer"
    r"|(^|_)(token|key|pat|pass|passphrase)$)",
    re.IGNORECASE,
)
_FORM = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}"
    r"|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{20,}|xox[baprs]-[A-Za-z0-9-]{10,}"
    r"|wandb_v1_[A-Za-z0-9_]{20,}|eyJ[A-Za-z0-9_-]{15,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,})"
)
# A variable of the shell in place of the password is not a secret: its value is never written.
_ADDRESS = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@]*:)(?!\$)([^\s/@]+)(@)")
_PAIR = re.compile(
    r"(?i)\b([A-Z0-9_]*(?:API_?KEY|SECRET|PASSWORD|PASSWD|ACCESS_?KEY|_TOKEN|_PAT\b)[A-Z0-9_]*)"
    r"(\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|\S+)"
)
_ASSIGNMENT = re.compile(r"\b([A-Z][A-Z0-9_]*)=(?!\$)[^\s,]")


def looks_secret(name: str) -> bool:
    """Names of keys and passwords, which may be in a shell's environment and never in a recipe or a run folder.

    `WANDB_API_KEY`, `HF_TOKEN`, `GITHUB_PAT`, `password`; not `tokens`, `tokenizer` or `NCCL_DEBUG`.
    """
    return _NAME.search(name) is not None


def find_secret(text: str) -> str | None:
    """What kind of secret a text holds, without the secret; None: no secret.

    `ALL,HF_TOKEN=abc`, `https://ann:abc@host/`, the form of a well-known token.
    """
    if name := next((name for name in _ASSIGNMENT.findall(text) if looks_secret(name)), None):
        return f"the value of {name}"
    if _ADDRESS.search(text):
        return "a password in an address"
    return "a token" if _FORM.search(text) else None


def redact_text(text: str) -> str:
    """Secrets inside a text: `WANDB_API_KEY=abc`, passwords in addresses and well-known key forms."""
    text = _ADDRESS.sub(rf"\1{HIDDEN}\3", text)
    return _FORM.sub(HIDDEN, _PAIR.sub(lambda m: f"{m[1]}{m[2]}{HIDDEN}", text))
